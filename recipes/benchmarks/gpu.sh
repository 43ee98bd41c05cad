#!/usr/bin/env bash
# Everything that needs a GPU, in one command: tests, the cost of a step, the main job, and a report.
#
#     make gpu                                         # one GPU, no hub; at most 25 minutes
#     make gpu ARGS="tests step-lora"                  # some parts; the report keeps earlier results of the others
#     make gpu LENGTH=1024 BASELINES=value             # for a card of less than 140 GB: the longest completion, in tokens;
#                                                      # and two models at once in the place of four
#     SMALL=1 recipes/benchmarks/gpu.sh                # every part, tiny, on two CPU cores
#
# Each part is a command with a log and a time limit; if one fails, the others continue. runs/gpu/report.md says how each
# ended, on which machine, and what it printed last: the tables for the Cost section of recipes/README.md. It can be
# posted as it is (recipes/NUMBERS.md): it holds no prompts, paths of yours or weights.
#
# To a machine without network, copy this checkout and wheels of the packages it lacks: usually trl, datasets, dill and
# multiprocess (peft, pytest-xdist and matplotlib are often installed); for the main job also reasoning-gym,
# math-verify and their requirements.
set -uo pipefail
cd "$(dirname "$0")/../.." || exit
PYTHON=${PYTHON:-.venv/bin/python} FOLDER=${FOLDER:-runs/gpu} MINUTE=${MINUTE:-60} # seconds per minute of a limit
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1
PARTS="tests step-lora step-full step-generated advantages main"
CHOSEN=${*:-$PARTS}
FAILED=""

if [ -n "${SMALL:-}" ]; then
    export CUDA_VISIBLE_DEVICES=""
    marks="not gpu and not slow" device=cpu advantages="--longest 2048"
    step="--shape small --length ${LENGTH:-16} --rounds 1 --steps 1"
    main="--use_cpu true --max_steps 2 --per_device_train_batch_size 16 --per_device_eval_batch_size 40 \
        --num_train_problems 200 --num_held_out_problems 20 --eval_strategy no"
else
    marks=gpu device=cuda advantages="" main="--use_cpu false"
    step="--shape qwen2.5-1.5b --length ${LENGTH:-4096} --gradient_checkpointing --rounds 3 --steps 1"
fi
step+=" --baselines ${BASELINES:-group_mean otb value}"

for name in $CHOSEN; do
    [[ " $PARTS " == *" $name "* ]] || { echo "There is no part $name, only $PARTS." && exit 2; }
done
MACHINE=$("$PYTHON" - "$device" <<'END'
import sys, torch, transformers, trl
if sys.argv[1] == "cuda" and not torch.cuda.is_available():
    sys.exit("No GPU is there. `SMALL=1 recipes/benchmarks/gpu.sh` runs every part on the CPU, tiny.")
name = torch.cuda.get_device_name() if sys.argv[1] == "cuda" else "CPU"
print(f"{name}; Python {sys.version.split()[0]}, torch {torch.__version__}", end=", ")
print(f"transformers {transformers.__version__}, trl {trl.__version__}")
END
) || exit 1
mkdir -p "$FOLDER"

part() { # name, limit in minutes, what Python is called with
    local name=$1 limit=$2 began=$SECONDS outcome=done
    shift 2
    [[ " $CHOSEN " == *" $name "* ]] || return
    echo "$name, at most $limit min: python $*"
    timeout --kill-after 10 $((limit * MINUTE)) "$PYTHON" "$@" > "$FOLDER/$name.log" 2>&1
    local status=$?
    [ $status = 0 ] || outcome="failed with exit status $status"
    [ $status = 124 ] && outcome="stopped at its limit of $limit min"
    [ $status = 0 ] || FAILED+=" $name"
    {
        printf '### %s: %s, %s s\n\n%s; %s\n\n```\n$ python %s\n' \
            "$name" "$outcome" $((SECONDS - began)) "$MACHINE" "$(date -I)" "$*"
        grep -v '^\s*$' "$FOLDER/$name.log" | tail -n 25
        printf '```\n\n'
    } | tee "$FOLDER/$name.md"
    {
        printf '# trl_otb on %s\n\nBy `make gpu`%s. ' "$MACHINE" "${SMALL:+ with SMALL=1}"
        printf 'What each part printed last; failures are welcome, too.\n\n'
        for of in $PARTS; do cat "$FOLDER/$of.md" 2> /dev/null; done
    } | sed "s#$PWD/##g; s#$HOME#~#g" > "$FOLDER/report.md"
}

part tests 3 -m pytest -q -n 0 -m "$marks" tests/trainer/test_gpu.py
part step-lora 6 -m recipes.benchmarks.step --device $device $step --lora --regimes stored stored-twice
part step-full 6 -m recipes.benchmarks.step --device $device $step --regimes stored stored-twice
part step-generated 3 -m recipes.benchmarks.step --device $device $step --length 128 --regimes generated
part advantages 2 -m recipes.benchmarks.advantages --device $device $advantages
[[ " $CHOSEN " != *" main "* ]] || rm -rf "$FOLDER/main" # an earlier run's
part main 5 recipes/math.py --output_dir "$FOLDER/main" --disable_tqdm true $main
URL=$(sed -n 's/^Repository = "\([^"]*\)".*/\1/p' pyproject.toml)
echo "We hardly ever have a GPU: please post $FOLDER/report.md as it is, at $URL/issues/new"
echo "$FOLDER: report.md, and a log of each part. ${FAILED:+Failed:$FAILED.}"
[ -z "$FAILED" ]
