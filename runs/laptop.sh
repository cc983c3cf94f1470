#!/usr/bin/env bash
# The whole pipeline on the toy world: from an empty folder to an assistant that RLHF improved.
#
#   bash runs/laptop.sh              on two cores about 16 minutes; stop and start it as you like
#   SEED=1 OUT=out/laptop1 bash runs/laptop.sh
#
# text -> tokens -> policy -> answers -> choices -> preference model -> reward -> policy
set -euo pipefail
cd "$(dirname "$0")/.."
bash runs/setup.sh
PY="${VENV:-.venv}/bin/python"
OUT="${OUT:-out/laptop}"
SEED="${SEED:-0}"
OTHER_SEED=$((SEED + 1000))
# Idle threads soon sleep instead of spinning: several times faster when the machine does other work
# too, and as fast when it does not.
export GOMP_SPINCOUNT="${GOMP_SPINCOUNT:-1000}"

# A look at the world: documents, a comparison, the gold of answers. 1 second.
$PY data/world.py

# Stage 0: a base model with all its personas, good and bad. 4 minutes.
$PY pretrain.py --out "$OUT/pretrain" --seed "$SEED"

# Stage 1: the HHH prompt goes into the weights. 40 seconds.
$PY distill.py --init "$OUT/pretrain" --out "$OUT/distill" --seed "$SEED"

# Stage 2: the distilled policy answers, annotators choose (40 seconds); the preference model is
# pretrained on the world's own answers (90 seconds), then learns the choices (40 seconds).
$PY collect.py --count 6000 --policy "$OUT/distill" --out "$OUT/comparisons" --seed "$SEED"
$PY preference.py --init "$OUT/pretrain" --out "$OUT/pmp" --seed "$SEED"
$PY preference.py --init "$OUT/pmp" --data "$OUT/comparisons" --pairs 0 --lr 3e-4 \
    --out "$OUT/pm" --seed "$SEED"

# Stage 3: RLHF. 80 seconds.
$PY ppo.py --policy "$OUT/distill" --pm "$OUT/pm" --out "$OUT/ppo" --seed "$SEED"

# Stage 4: better policies give better answers to choose from; new models, and Elo. 6 minutes.
$PY online.py --policy "$OUT/distill" --pmp "$OUT/pmp" --data "$OUT/comparisons" --pm "$OUT/pm" \
    --out "$OUT/online" --seed "$SEED"

# Stage 5: which prompts are out of distribution? All layers of three models; a guard of one, which
# declines such prompts before anything is generated. 25 seconds.
$PY ood.py --ckpt "$OUT/pretrain,$OUT/distill,$OUT/pm" --out "$OUT/ood" --seed "$SEED"
$PY ood.py --ckpt "$OUT/distill" --layer 3 --out "$OUT/guard" --seed "$SEED"

# The report (20 seconds); first, comparisons that test the preference model on animals that it
# never met, and on other prompts about those it did (20 seconds each).
$PY collect.py --count 3000 --policy "$OUT/distill" --out "$OUT/heldout" --seed "$SEED" \
    --heldout
$PY collect.py --count 3000 --policy "$OUT/distill" --out "$OUT/test" --seed "$OTHER_SEED"
$PY eval.py --report --run "$OUT" --seed "$SEED"
echo "talk to it: $PY sample.py --ckpt $OUT/ppo        look at it: $OUT/report.md"
echo "guard it: $PY sample.py --ckpt $OUT/ppo --guard $OUT/guard        declines what is unlike plain questions"
echo "judge it: $PY feedback.py --policies $OUT/ppo $OUT/online/ppo-2        answers side by side"
