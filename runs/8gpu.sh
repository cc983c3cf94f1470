#!/usr/bin/env bash
# The HH pipeline from GPT-2's or Pythia's weights and the real comparisons, on the GPUs of a machine or of several.
#
#   bash runs/8gpu.sh --model FOLDER --hh FOLDER             weights with their tokenizer; files of HH-RLHF
#   bash runs/8gpu.sh --model FOLDER --hh FOLDER --text NAMES --forum FILE --hhh FILE --lambada FILE --arc FILE
#   bash runs/8gpu.sh --model FOLDER --hh FOLDER --rounds base,rs,online     a PM and a policy for each lot, as online
#   bash runs/8gpu.sh --gpus 2 --model FOLDER --hh FOLDER --rehearse         does everything run? also on two cores
#   NNODES=2 NODE=0 ENDPOINT=host:29500 bash runs/8gpu.sh ...                on each of two machines, NODE 0 and 1,
#                                                                            with --out on a disk that both have
#   --model FOLDER   a Hugging Face folder: GPT-2 (data/download.py --gpt2) or Pythia
#   --hh FOLDER      python data/download.py fetches it
#   --text NAMES     text like the model's own, .txt and .jsonl, commas between: half of what distillation reads
#   --forum FILE     answers with votes (a StackExchange dump as JSON lines): PM pretraining, distillation's other half
#   --prompt FILE    the HHH prompt to distill (data/hhh.txt)
#   --hhh FILE       the HHH comparisons; --lambada FILE, --arc FILE: benchmarks before and after, for the report
#   --generated N    prompts that the base model writes for RL; HH: 369,000 beside 137,000 collected ones (73000)
#   --rounds LOTS    all comparisons at once (all), or lots of them, commas between
#   --samples N      PPO's answers in all (102400)   --k K   passes over each (1; HH B.1: 1, 2 or 4)
#   --shard yes      weights and optimizer cut over the GPUs: from gpt2-xl and pythia-1.4b on, with 80 GB
#   --checkpoint yes blocks computed again in the backward pass: less memory, a third more time
#   --rate R         the model's pretraining rate, where runs/rates.py has none   --micro 8 rows a pass
#   --gpus 8         of each machine                                              --out out/8gpu
#
# weights -> roles and turns -> the HHH prompt -> PM on votes -> PM on comparisons -> PPO -> report
#
# Learning rates are the paper's shares of pretraining's: `python runs/rates.py`. Memory and hours of each stage are
# counted by `python runs/sizes.py`; NO GPU HAS RUN THIS YET, runs/test.sh --long rehearses it on a CPU. Counted
# for 8 H100s at 35% of their rate: distillation, PM and PPO take gpt2 3 minutes in all, pythia-1.4b 36 minutes and,
# sharded, 65 GB. It is the largest that fits 80 GB: PPO of pythia-2.8b, with 64 answers at once on a GPU, takes 116 GB.
# Data and evaluations, which one process does, come on top. Stop and start it as you like; a rank that dies is started
# again by torchrun and goes on from the stage's last checkpoint (prompts.py has none and begins anew).
set -euo pipefail
HERE=$PWD
cd "$(dirname "$0")/.."
. runs/names.sh

GPUS=8 MODEL="" HH="" TEXT="" FORUM="" HHH="" LAMBADA="" ARC="" PROMPT=data/hhh.txt GENERATED=73000 ROUNDS=all
SAMPLES=102400 K=1 SHARD="" AGAIN="" RATE="" MICRO=8 OUT=out/8gpu
NNODES=${NNODES:-1} NODE=${NODE:-0} ENDPOINT=${ENDPOINT:-}
# What a rehearsal makes small: rows and their tokens, steps, steps between checkpoints.
CONTEXT=1024 ROWS=64 ROLES=100 LENGTH=512 TEXTS=683616 NEW=128 BATCH=512 MINI=64 PAIRS=0 SAVE=500 SAVE_RL=10
for word in "$@"; do  # first, wherever it stands: other flags change its numbers, too
    if [ "$word" = --rehearse ]; then
        CONTEXT=80 ROWS=8 ROLES=4 LENGTH=24 TEXTS=128 NEW=12 BATCH=8 MINI=4 SAMPLES=24 PAIRS=256 SAVE=2 SAVE_RL=1
        GENERATED=0 MICRO=4
    fi
done
while [ $# -gt 0 ]; do
    if [ "$1" = --rehearse ]; then
        shift
        continue
    fi
    [ $# -gt 1 ] || fail "$1 needs a value; the first lines of runs/8gpu.sh list the flags"
    case "$1" in
        --gpus) GPUS=$2 ;;
        --model) MODEL=$(from_here "$2") ;;
        --hh) HH=$(from_here "$2") ;;
        --text) TEXT=$(all_from_here "$2") ;;
        --forum) FORUM=$(from_here "$2") ;;
        --hhh) HHH=$(from_here "$2") ;;
        --lambada) LAMBADA=$(from_here "$2") ;;
        --arc) ARC=$(from_here "$2") ;;
        --prompt) PROMPT=$(from_here "$2") ;;
        --generated) GENERATED=$2 ;;
        --rounds) ROUNDS=$2 ;;
        --samples) SAMPLES=$2 ;;
        --k) K=$2 ;;
        --shard) [ "$2" = no ] || SHARD=$2 ;;
        --checkpoint) [ "$2" = no ] || AGAIN=$2 ;;
        --rate) RATE=$2 ;;
        --micro) MICRO=$2 ;;
        --out) OUT=$2 ;;
        *) fail "unknown flag $1; the first lines of runs/8gpu.sh list the flags" ;;
    esac
    shift 2
done
[ -n "$MODEL" ] || fail "--model FOLDER is missing: Pythia, or GPT-2 (python data/download.py --gpt2)"
[ -n "$HH" ] || fail "--hh FOLDER is missing: files of HH-RLHF (python data/download.py fetches them)"
need_names "$TEXT" "$MODEL" "$HH" "$PROMPT" "$FORUM" "$HHH" "$LAMBADA" "$ARC"
for LOT in ${ROUNDS//,/ }; do
    case "$LOT" in all | base | rs | online) ;; *) fail "--rounds $ROUNDS: all, or of base, rs, online" ;; esac
done
[ "$NNODES" = 1 ] || [ -n "$ENDPOINT" ] || fail "NNODES=$NNODES needs ENDPOINT=host:port of the machine with NODE=0"

PROMPT_STEPS=$((TEXTS / 32)) ITERATIONS=$((SAMPLES / BATCH))
[ "$ITERATIONS" -gt 0 ] || fail "--samples $SAMPLES: fewer than the $BATCH of one iteration"
if [ "$NODE" = 0 ] && [ "$NNODES" != 1 ]; then  # the others end when this machine does in an error
    rm -f "$OUT/failed"
    trap '[ $? = 0 ] || { mkdir -p "$OUT" && touch "$OUT/failed"; }' EXIT
fi
bash runs/setup.sh
PY="${VENV:-.venv}/bin/python"
export GOMP_SPINCOUNT="${GOMP_SPINCOUNT:-1000}" OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
need_safetensors "$MODEL"

STAGE=0
ranks() {  # a stage and its flags, on all GPUs of all machines; a failed start is followed by up to ten others
    STAGE=$((STAGE + 1))
    if [ "$NNODES" = 1 ]; then
        "$PY" -m torch.distributed.run --standalone --nproc_per_node="$GPUS" --max-restarts=10 "$@"
    else
        TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 "$PY" -m torch.distributed.run --nnodes="$NNODES" \
            --nproc_per_node="$GPUS" --rdzv_backend=c10d --rdzv_endpoint="$ENDPOINT" --rdzv_id="$STAGE" \
            --max-restarts=10 "$@"
    fi
}
once() {  # once FILE COMMAND...: FILE is what the command writes last; the first machine runs it, others wait
    local file=$1
    shift
    if [ "$NODE" = 0 ]; then
        [ -e "$file" ] || "$@"
        return
    fi
    [ -e "$file" ] ||
        echo "waiting for $file, which the machine with NODE=0 makes; --out must be on a disk that all share"
    until [ -e "$file" ]; do
        [ ! -e "$OUT/failed" ] ||
            fail "$OUT/failed: the machine with NODE=0 ended in an error; start it again first, then this one"
        sleep 5
    done
}
comparisons() {  # comparisons LOT: rows of HH-RLHF to comparisons; all lots split their first prompts alike
    local folders=("$HH")
    case "$1" in
        all) ;;
        base) folders=("$HH/helpful-base" "$HH/harmless-base") ;;
        rs) folders=("$HH/helpful-rejection-sampled") ;;
        online) folders=("$HH/helpful-online") ;;
    esac
    once "$OUT/data-$1/test.jsonl" "$PY" data/hh.py "${folders[@]}" --out "$OUT/data-$1" --test 0.05
}

RATES=$("$PY" runs/rates.py "${RATE:-$MODEL}")
rate() { sed -n "s/^$1 //p" <<<"$RATES"; }
LR_ROLES=$(rate dialogues) LR_DISTILL=$(rate distill) LR_PMP=$(rate pmp) LR_PM=$(rate pm) LR_RL=$(rate ppo)
for LOT in ${ROUNDS//,/ }; do comparisons "$LOT"; done
FIRST=$OUT/data-${ROUNDS%%,*}/train.jsonl

# The weights, and in some dialogues the ids of roles and turns, which these weights never saw: 100 steps of 64 rows
# of 1,024 tokens. Not of the paper, whose models read dialogues as plain text.
once "$OUT/import/ckpt.pt" "$PY" sample.py --import-hf "$MODEL" --tokenizer "$MODEL" --out "$OUT/import"
once "$OUT/dialogues/tokens.json" "$PY" data/tokens.py "$FIRST" --tokenizer "$MODEL" --out "$OUT/dialogues"
ranks pretrain.py --init "$OUT/import" --tokens "$OUT/dialogues" --context "$CONTEXT" --batch "$ROWS" \
    --micro "$MICRO" --steps "$ROLES" --warmup 10 --lr "$LR_ROLES" --every "$SAVE" ${SHARD:+--shard} \
    ${AGAIN:+--checkpoint} --out "$OUT/base"

# The HHH prompt into the weights (HH A.1): batches of 32, at most 350 million tokens, rate 0.05, linear to zero.
TALKS=$FIRST
if [ -n "$FORUM" ]; then
    once "$OUT/forum.jsonl" "$PY" data/forum.py "$FORUM" --out "$OUT/forum.jsonl"
    TALKS=$OUT/forum.jsonl
fi
if [ -n "$TEXT" ]; then
    once "$OUT/tokens/tokens.json" "$PY" data/tokens.py "$TEXT" --tokenizer "$MODEL" --out "$OUT/tokens"
fi
ranks distill.py --init "$OUT/base" --prompt "$PROMPT" --dialogues "$TALKS" ${TEXT:+--tokens "$OUT/tokens"} \
    --no-cache --texts "$TEXTS" --length "$LENGTH" --batch 32 --steps "$PROMPT_STEPS" --micro "$MICRO" \
    --lr "$LR_DISTILL" --every "$SAVE" ${SHARD:+--shard} ${AGAIN:+--checkpoint} --out "$OUT/distill"

# PM pretraining on votes (HH A.2): one epoch, rate 0.1.
INIT=$OUT/base
if [ -n "$FORUM" ]; then
    ranks preference.py --init "$INIT" --data "$OUT/forum.jsonl" --test "${FIRST%train.jsonl}test.jsonl" \
        --pairs "$PAIRS" --batch 64 --micro "$MICRO" --lr "$LR_PMP" --every "$SAVE" \
        ${SHARD:+--shard} ${AGAIN:+--checkpoint} --out "$OUT/pmp"
    INIT=$OUT/pmp
fi

# Prompts for RL that the base model writes after ten of people's (HH 4.1).
if [ "$GENERATED" != 0 ]; then
    ranks prompts.py --model "$OUT/base" --prompts "$FIRST" --count "$GENERATED" --new "$NEW" --unique \
        --out "$OUT/prompts"
    WRITTEN=$OUT/prompts
fi

DATA="" TEST=""
for LOT in ${ROUNDS//,/ }; do
    DATA=${DATA:+$DATA,}$OUT/data-$LOT/train.jsonl TEST=${TEST:+$TEST,}$OUT/data-$LOT/test.jsonl
    # The comparisons of all lots so far (HH A.2): one epoch, rate 0.01.
    ranks preference.py --init "$INIT" --data "$DATA" --test "$TEST" --pairs "$PAIRS" --batch 64 --micro "$MICRO" \
        --lr "$LR_PM" --every "$SAVE" ${SHARD:+--shard} ${AGAIN:+--checkpoint} --out "$OUT/pm-$LOT"

    # PPO (HH 4.1, B.1): rate 0.01, lambda_KL 0.001 on raw scores, clip 0.2, gamma 1, no entropy bonus, temperature 1,
    # 128 tokens; online, rates halve after each 100,000 answers. Batch and warm-up are InstructGPT's (C.4).
    ranks ppo.py --policy "$OUT/distill" --pm "$OUT/pm-$LOT" --prompts "$DATA" \
        ${WRITTEN:+--generated "$WRITTEN" --mix 0.73} --new "$NEW" --temperature 1 --samples "$BATCH" \
        --minibatch "$MINI" --epochs "$K" --iterations "$ITERATIONS" --micro "$MICRO" --lr "$LR_RL" \
        --critic-lr "$LR_RL" --warmup 10 --halve 100000 --kl reward --lambda-kl 0.001 --clip 0.2 --gamma 1 \
        --calibrate 0 --unfinished 0 --every "$SAVE_RL" ${SHARD:+--shard} ${AGAIN:+--checkpoint} --out "$OUT/ppo-$LOT"

    # The report: the PM's accuracy and calibration; what RLHF costs elsewhere; whether anything broke.
    once "$OUT/report-$LOT/analysis.png" "$PY" analyze.py --pm "$OUT/pm-$LOT" --data "$TEST" ${HHH:+--hhh "$HHH"} \
        --gender --out "$OUT/report-$LOT"
    if [ -n "$LAMBADA$ARC" ]; then
        once "$OUT/tax-$LOT/benchmark.md" "$PY" benchmark.py --ckpt "$OUT/base,$OUT/distill,$OUT/ppo-$LOT" \
            ${LAMBADA:+--lambada "$LAMBADA"} ${ARC:+--arc "$ARC"} --out "$OUT/tax-$LOT"
    fi
    if [ "$NODE" = 0 ]; then "$PY" doctor.py "$OUT/ppo-$LOT" || true; fi
done
echo "talk to it: $PY sample.py --new 128 --ckpt $OUT/ppo-$LOT        look at it: $OUT/report-$LOT/analysis.md"
