"""GSM8K for Axolotl: its questions as conversations, and 1 for a completion whose last number is the answer."""

import re


def gsm8k(cfg, *args, **kwargs):
    def conversation(example, tokenizer=None):
        answer = example["answer"].rpartition("####")[2].strip().replace(",", "")
        return {"prompt": [{"role": "user", "content": example["question"]}], "answer": answer}

    return conversation


def correct(completions, answer, **kwargs):
    texts = [of if isinstance(of, str) else of[-1]["content"] for of in completions]
    found = [re.findall(r"-?\d+(?:\.\d+)?", text.replace(",", "")) for text in texts]
    return [float(bool(of) and float(of[-1]) == float(right)) for of, right in zip(found, answer, strict=True)]
