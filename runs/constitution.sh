#!/usr/bin/env bash
# Constitutional AI on the toy world: SL-CAI and RL-CAI, beside RLHF from people's labels.
#
#   bash runs/constitution.sh        a base model (13 minutes of one core), then 16 minutes on two
#                                    cores; stop and start it as you like
#   SEED=1 OUT=out/laptop1/cai bash runs/constitution.sh
#
# helpful-only policy -> critique and revision -> SL-CAI -> AI feedback -> preference model -> RL-CAI
set -euo pipefail
cd "$(dirname "$0")/.."
bash runs/setup.sh
PY="${VENV:-.venv}/bin/python"
OUT="${OUT:-out/laptop/cai}"
SEED="${SEED:-0}"
SIZE="${SIZE:-micro}"
export GOMP_SPINCOUNT="${GOMP_SPINCOUNT:-1000}"

# The principles' world: a document of each form, and what there is of it. 1 second.
$PY data/principles.py

# A base model of text in which people also criticize, revise and judge; the HHH prompt distilled.
$PY pretrain.py --world principles --size "$SIZE" --context 512 --vocab 1024 --documents 116000 \
    --steps 3600 --batch 32 --lr 3e-3 --every 600 --out "$OUT/pretrain" --seed "$SEED"
$PY distill.py --init "$OUT/pretrain" --out "$OUT/distill" --seed "$SEED"

# Annotators choose: on plain prompts the more helpful answer; on harmful ones the less harmful,
# where harm alone counts for them, as before CAI's instruction to prefer who engages.
$PY collect.py --count 3000 --harmful 0 --policy "$OUT/distill" --out "$OUT/choices-helpful" --seed "$SEED"
$PY collect.py --count 3000 --harmful 1 --no-engaged --tranche harmless --policy "$OUT/distill" \
    --out "$OUT/choices-harmless" --seed "$SEED"

# RLHF on helpfulness alone, on all prompts: what harmful ones get is up to a preference model that
# never saw one compared. Its snapshot at sqrt(KL) 1.2 answers and revises: later it forgets how to.
$PY preference.py --init "$OUT/pretrain" --harmful 0 --pairs 24000 --lr 2e-3 --out "$OUT/pmp" --seed "$SEED"
$PY preference.py --init "$OUT/pmp" --data "$OUT/choices-helpful" --pairs 0 --lr 6e-4 \
    --out "$OUT/pm-helpful" --seed "$SEED"
$PY ppo.py --policy "$OUT/distill" --pm "$OUT/pm-helpful" --iterations 50 --snapshots 1.2 \
    --out "$OUT/helpful" --seed "$SEED"

# RLHF on both kinds of choices, beside CAI. (claims/cai.py compares them on as many pairs, made alike.)
$PY preference.py --init "$OUT/pmp" --data "$OUT/choices-helpful,$OUT/choices-harmless" --pairs 0 \
    --lr 6e-4 --out "$OUT/pm-hh" --seed "$SEED"
$PY ppo.py --policy "$OUT/distill" --pm "$OUT/pm-hh" --iterations 50 --out "$OUT/hh" --seed "$SEED"

# Red-team prompts: half are people's, half the base model writes after ten of theirs.
$PY prompts.py --model "$OUT/pretrain" --harmful 0.8 --count 1000 --out "$OUT/prompts" --seed "$SEED"

# SL-CAI, then RL-CAI; then RL-CAI with reasoning, from the same SL-CAI.
$PY constitution.py --init "$OUT/pretrain" --policy "$OUT/helpful/snapshot-1.2.pt" --data "$OUT/choices-helpful" \
    --pmp "$OUT/pmp" --generated "$OUT/prompts" --out "$OUT/run" --seed "$SEED"
$PY constitution.py --init "$OUT/pretrain" --policy "$OUT/helpful/snapshot-1.2.pt" --data "$OUT/choices-helpful" \
    --pmp "$OUT/pmp" --generated "$OUT/prompts" --sl "$OUT/run/sl" --reason --clamp 0.6 \
    --out "$OUT/reason" --seed "$SEED"

# From 0 to 4: how far answers of each go along with harm, as attackers would rate it.
$PY harm.py --init "$OUT/pretrain" --attacked "$OUT/pretrain,$OUT/distill,$OUT/helpful" \
    --policies "distilled=$OUT/distill" "helpful=$OUT/helpful" "HH=$OUT/hh" "SL-CAI=$OUT/run/sl" \
    "RL-CAI=$OUT/run/rl" "reasoning=$OUT/reason/rl" --out "$OUT/harm" --seed "$SEED"

# Helpful against harmless Elo, by annotators who prefer who engages, and by those for whom harm
# alone counts.
for WHO in engaged no-engaged; do
    $PY elo.py --policies "distilled=$OUT/distill" "helpful=$OUT/helpful" "HH=$OUT/hh" \
        "SL-CAI=$OUT/run/sl" "RL-CAI=$OUT/run/rl" "reasoning=$OUT/reason/rl" --reference SL-CAI \
        --$WHO --out "$OUT/elo-$WHO" --seed "$SEED"
done
echo "talk to it: $PY sample.py --ckpt $OUT/run/rl        compare: $OUT/elo-engaged/frontier.png"
