"""
python -m trl_otb.display RUN RUN ... --output both.html: one page of several runs, to compare them prompt by prompt.

RUN is an output folder with a `_rollouts.html`, or such a page.
"""

import argparse

from .page import join_pages


parser = argparse.ArgumentParser("python -m trl_otb.display", description=__doc__.strip().partition("\n")[0])
parser.add_argument("runs", nargs="+", metavar="RUN", help="an output folder with a _rollouts.html, or such a page")
parser.add_argument("--output", required=True, help="the page to write")
if __name__ == "__main__":
    given = parser.parse_args()
    try:
        join_pages(given.runs, given.output)
    except ValueError as error:
        parser.error(str(error))
