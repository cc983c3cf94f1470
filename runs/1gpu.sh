#!/usr/bin/env bash
# A model of 124 million parameters in one night on one GPU: from text to an assistant that RLHF improved.
#
#   bash runs/1gpu.sh --text NAMES --hh FOLDER              .txt, .jsonl and .jsonl.gz files or folders, commas between
#   bash runs/1gpu.sh --gpt2 FOLDER --hh FOLDER             or begin from GPT-2's own weights (data/download.py --gpt2)
#   bash runs/1gpu.sh --text NAMES --hh FOLDER --rehearse   does everything run? small numbers, on a CPU in minutes
#
#   --hh FOLDER      files of HH-RLHF: python data/download.py fetches them
#   --bpe FOLDER     GPT-2's vocab.bpe and encoder.json; without it tiktoken fetches them
#   --forum FILE     answers with votes (a StackExchange dump as JSON lines): PM pretraining, half of distillation
#   --prompt FILE    the HHH prompt to distill (data/hhh.txt)
#   --hhh FILE       the HHH comparisons; --lambada FILE, --arc FILE: benchmarks before and after, for the report
#   --size gpt2      of the model, and --rate R its pretraining rate, where runs/rates.py has none
#   --steps 9536     of pretraining, 524,288 tokens each: 5 billion tokens; 2.5 to 10 billion are a night's work
#   --micro 16       rows a pass      --out out/1gpu     folder
#
# text -> tokens -> base model -> the HHH prompt -> PM on votes -> PM on comparisons -> PPO -> report
#
# Learning rates are the paper's shares of pretraining's: `python runs/rates.py`. Memory and hours of each stage are
# counted by `python runs/sizes.py`; no GPU has run this yet, runs/test.sh --long rehearses it. Beside each stage stands
# what is counted, not measured, for an H100 at 35% of its rate; an A100 has a third of it. The most memory is that of
# PPO's 512 answers at once, 34 GB. Stop and start it as you like.
set -euo pipefail
HERE=$PWD
cd "$(dirname "$0")/.."
. runs/names.sh

TEXT="" HH="" GPT2="" BPE=gpt2 FORUM="" HHH="" LAMBADA="" ARC="" PROMPT=data/hhh.txt SIZE=gpt2 RATE=""
STEPS=9536 MICRO=16 OUT=out/1gpu
# What a rehearsal makes small: rows and their tokens, steps, steps between checkpoints.
CONTEXT=1024 ROWS=512 WARMUP=700 ROLES=100 ROLE_ROWS=64 LENGTH=512 TEXTS=683616 NEW=128 BATCH=512 MINI=64
SAMPLES=102400 PAIRS=0 SAVE=250 SAVE_RL=10
for word in "$@"; do  # first, wherever it stands: other flags change its numbers, too
    if [ "$word" = --rehearse ]; then
        CONTEXT=320 ROWS=8 WARMUP=2 ROLES=4 ROLE_ROWS=8 LENGTH=24 TEXTS=128 NEW=12 BATCH=8 MINI=4 SAMPLES=24
        PAIRS=256 SAVE=2 SAVE_RL=1 STEPS=4 MICRO=4
    fi
done
while [ $# -gt 0 ]; do
    if [ "$1" = --rehearse ]; then
        shift
        continue
    fi
    [ $# -gt 1 ] || fail "$1 needs a value; the first lines of runs/1gpu.sh list the flags"
    case "$1" in
        --text) TEXT=$(all_from_here "$2") ;;
        --hh) HH=$(from_here "$2") ;;
        --gpt2) GPT2=$(from_here "$2") ;;
        --bpe) BPE=$(from_here "$2") ;;
        --forum) FORUM=$(from_here "$2") ;;
        --hhh) HHH=$(from_here "$2") ;;
        --lambada) LAMBADA=$(from_here "$2") ;;
        --arc) ARC=$(from_here "$2") ;;
        --prompt) PROMPT=$(from_here "$2") ;;
        --size) SIZE=$2 ;;
        --rate) RATE=$2 ;;
        --steps) STEPS=$2 ;;
        --micro) MICRO=$2 ;;
        --out) OUT=$2 ;;
        *) fail "unknown flag $1; the first lines of runs/1gpu.sh list the flags" ;;
    esac
    shift 2
done
[ -n "$TEXT$GPT2" ] || fail "--text NAMES is missing: what to pretrain on; or --gpt2 FOLDER: weights to begin from"
[ -n "$HH" ] || fail "--hh FOLDER is missing: files of HH-RLHF (python data/download.py fetches them)"
need_names "$TEXT" "$HH" "$PROMPT" "$GPT2" "$FORUM" "$HHH" "$LAMBADA" "$ARC"

PROMPT_STEPS=$((TEXTS / 32)) ITERATIONS=$((SAMPLES / BATCH))
bash runs/setup.sh
PY="${VENV:-.venv}/bin/python"
export GOMP_SPINCOUNT="${GOMP_SPINCOUNT:-1000}"
[ -z "$GPT2" ] || need_safetensors "$GPT2"
[ -z "$GPT2" ] || BPE=$GPT2
RATES=$("$PY" runs/rates.py "${RATE:-${GPT2:-$SIZE}}")
rate() { sed -n "s/^$1 //p" <<<"$RATES"; }
LR=$(rate pretrain) LR_ROLES=$(rate dialogues) LR_DISTILL=$(rate distill) LR_PMP=$(rate pmp)
LR_PM=$(rate pm) LR_RL=$(rate ppo)

# Rows to comparisons: minutes for all 170,000.
[ -e "$OUT/data/test.jsonl" ] || "$PY" data/hh.py "$HH" --out "$OUT/data" --test 0.05
TRAIN=$OUT/data/train.jsonl TALKS=$OUT/data/train.jsonl
if [ -n "$FORUM" ]; then
    TALKS=$OUT/forum.jsonl
    [ -e "$TALKS" ] || "$PY" data/forum.py "$FORUM" --out "$TALKS"
fi

# The text and the training dialogues as one file of ids: 5 billion in 45 minutes of one core, 10 GB on the disk.
"$PY" data/tokens.py ${TEXT:+"$TEXT"} "$TRAIN" --tokenizer "$BPE" --out "$OUT/tokens"

# Stage 0: a base model, 3.5 hours, 18 GB; or GPT-2's, which learns the ids of roles and turns, of which it knows
# nothing, in 100 steps of 64 rows of dialogues, 2 minutes.
if [ -n "$GPT2" ]; then
    "$PY" sample.py --import-hf "$GPT2" --tokenizer "$GPT2" --out "$OUT/import"
    "$PY" data/tokens.py "$TRAIN" --tokenizer "$GPT2" --out "$OUT/dialogues"
    "$PY" pretrain.py --init "$OUT/import" --tokens "$OUT/dialogues" --context "$CONTEXT" --batch "$ROLE_ROWS" \
        --micro "$MICRO" --steps "$ROLES" --warmup 10 --lr "$LR_ROLES" --every "$SAVE" --out "$OUT/base"
else
    "$PY" pretrain.py --tokens "$OUT/tokens" --size "$SIZE" --context "$CONTEXT" --batch "$ROWS" --micro "$MICRO" \
        --steps "$STEPS" --warmup "$WARMUP" --lr "$LR" --every "$SAVE" --out "$OUT/base"
fi

# Stage 1: the HHH prompt goes into the weights (HH A.1): batches of 32, at most 350 million tokens, rate 0.05, linear
# to zero. 21 minutes, 8 GB.
"$PY" distill.py --init "$OUT/base" --prompt "$PROMPT" --tokens "$OUT/tokens" --dialogues "$TALKS" --no-cache \
    --texts "$TEXTS" --length "$LENGTH" --batch 32 --steps "$PROMPT_STEPS" --micro 8 --lr "$LR_DISTILL" \
    --every "$SAVE" --out "$OUT/distill"

# Stage 2: PM pretraining on votes, rate 0.1; then the comparisons, rate 0.01; one epoch each (HH A.2).
# A minute, 8 GB.
INIT=$OUT/base
if [ -n "$FORUM" ]; then
    "$PY" preference.py --init "$INIT" --data "$TALKS" --test "$OUT/data/test.jsonl" --pairs "$PAIRS" --batch 64 \
        --micro "$MICRO" --lr "$LR_PMP" --every "$SAVE" --out "$OUT/pmp"
    INIT=$OUT/pmp
fi
"$PY" preference.py --init "$INIT" --data "$TRAIN" --test "$OUT/data/test.jsonl" --pairs "$PAIRS" --batch 64 \
    --micro "$MICRO" --lr "$LR_PM" --every "$SAVE" --out "$OUT/pm"

# Stage 3: PPO (HH 4.1, B.1): rate 0.01, lambda_KL 0.001 on raw scores, clip 0.2, gamma 1, no entropy bonus, K = 1,
# temperature 1, 128 tokens, 100,000 answers. Batch and warm-up are InstructGPT's (C.4).
# 5 minutes, 34 GB.
"$PY" ppo.py --policy "$OUT/distill" --pm "$OUT/pm" --prompts "$TRAIN" --new "$NEW" --temperature 1 \
    --samples "$BATCH" --minibatch "$MINI" --epochs 1 --iterations "$ITERATIONS" --micro "$MICRO" \
    --lr "$LR_RL" --critic-lr "$LR_RL" --warmup 10 --kl reward --lambda-kl 0.001 --clip 0.2 --gamma 1 \
    --calibrate 0 --unfinished 0 --every "$SAVE_RL" --out "$OUT/ppo"

# The report: the PM's accuracy and calibration; what RLHF costs elsewhere; whether anything broke.
[ -e "$OUT/report/analysis.png" ] || "$PY" analyze.py --pm "$OUT/pm" --data "$OUT/data/test.jsonl" \
    ${HHH:+--hhh "$HHH"} --gender --out "$OUT/report"
if [ -n "$LAMBADA$ARC" ]; then
    [ -e "$OUT/tax/benchmark.md" ] || "$PY" benchmark.py --ckpt "$OUT/base,$OUT/distill,$OUT/ppo" \
        ${LAMBADA:+--lambada "$LAMBADA"} ${ARC:+--arc "$ARC"} --out "$OUT/tax"
fi
"$PY" doctor.py "$OUT/ppo" || true
echo "talk to it: $PY sample.py --new 128 --ckpt $OUT/ppo        look at it: $OUT/report/analysis.md"
