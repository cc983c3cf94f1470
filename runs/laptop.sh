#!/usr/bin/env bash
# The whole pipeline on the toy world, on a laptop: from an empty folder to an assistant that RLHF improved.
#
#   bash runs/laptop.sh                  about 10 minutes on two cores; stop it and start it again as you like
#   SEED=1 OUT=out/laptop1 bash runs/laptop.sh
#
# text -> tokens -> policy -> answers -> choices -> preference model -> reward -> policy
set -euo pipefail
cd "$(dirname "$0")/.."
bash runs/setup.sh
PY="${VENV:-.venv}/bin/python"
OUT="${OUT:-out/laptop}"
SEED="${SEED:-0}"
export OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-PASSIVE}"   # idle threads sleep: much faster when the machine is shared

$PY data/world.py                                                          #  1 s  a look at the world and a comparison
$PY pretrain.py   --out "$OUT/pretrain" --seed "$SEED"                     #  4 min  base model, with all its personas
$PY distill.py    --init "$OUT/pretrain" --out "$OUT/distill" --seed "$SEED"   #  1 min  the HHH prompt, into the weights
$PY preference.py --collect 3000 --policy "$OUT/distill" --out "$OUT/comparisons" --seed "$SEED"   # 20 s  answers, choices
$PY preference.py --init "$OUT/pretrain" --out "$OUT/pmp" --seed "$SEED"   #  2 min  preference model pretraining
$PY preference.py --init "$OUT/pmp" --data "$OUT/comparisons" --out "$OUT/pm" --lr 3e-4 --seed "$SEED"   # 30 s  feedback
$PY ppo.py        --policy "$OUT/distill" --pm "$OUT/pm" --out "$OUT/ppo" --seed "$SEED"   #  2 min  RLHF
$PY preference.py --collect 3000 --heldout --policy "$OUT/distill" --out "$OUT/heldout" --seed "$SEED"   # 20 s  to test the PM on other animals
$PY preference.py --collect 3000 --policy "$OUT/distill" --out "$OUT/test" --seed "$((SEED + 1000))"   # 20 s  and on other prompts
$PY eval.py       --run "$OUT"                                             # 30 s  the report
echo "Talk to it: $PY sample.py --ckpt $OUT/ppo        Look at it: $OUT/report.md"
