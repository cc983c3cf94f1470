#!/usr/bin/env bash
# The path of runs/laptop.sh with tiny sizes: does everything run? Its numbers mean nothing.
#
#   bash runs/smoke.sh               under 2 minutes on two cores; OUT=folder chooses where
set -euo pipefail
cd "$(dirname "$0")/.."
bash runs/setup.sh
PY="${VENV:-.venv}/bin/python"
OUT="${OUT:-out/smoke}"
export GOMP_SPINCOUNT="${GOMP_SPINCOUNT:-1000}"

$PY data/world.py > /dev/null
$PY pretrain.py --out "$OUT/pretrain" --size nano --documents 2000 --steps 60 --every 30
$PY distill.py --init "$OUT/pretrain" --out "$OUT/distill" --texts 128 --steps 8 --every 4
$PY collect.py --count 128 --policy "$OUT/distill" --out "$OUT/comparisons"
$PY preference.py --init "$OUT/pretrain" --out "$OUT/pmp" --pairs 256
$PY preference.py --init "$OUT/pmp" --data "$OUT/comparisons" --pairs 0 --out "$OUT/pm"
$PY ppo.py --policy "$OUT/distill" --pm "$OUT/pm" --out "$OUT/ppo" --iterations 3 --samples 32 \
    --minibatch 16 --calibrate 32 --every 2
$PY ppo.py --policy "$OUT/ppo" --reference "$OUT/distill" --pm "$OUT/pm" --trace
$PY prompts.py --model "$OUT/pretrain" --prompts "$OUT/comparisons/comparisons.jsonl" --out "$OUT/prompts" --count 32
$PY sft.py --init "$OUT/pretrain" --pm "$OUT/pm" --demos 128 --epochs 1 --mix 0.25 --eval-prompts 16 --out "$OUT/sft"
$PY rejection.py --policy "$OUT/sft" --pm "$OUT/pm" --count 16 --answers 4 --out "$OUT/rejection"
$PY ppo.py --policy "$OUT/sft" --pm "$OUT/pm" --test-pm "$OUT/pmp" --out "$OUT/variants" --iterations 2 --samples 16 \
    --minibatch 8 --calibrate 16 --every 1 --generated "$OUT/prompts" --kl k3 --kl-target 1 --ptx 0.5 --ema 0.9 \
    --anchor 0.9 --critic policy --snapshots 0,1 --cap 3 --halve 32
$PY online.py --policy "$OUT/distill" --pmp "$OUT/pmp" --data "$OUT/comparisons" --pm "$OUT/pm" --rs 64 --best 4 \
    --count 64 --iterations 2 --samples 32 --snapshots 0 --matches 16 --out "$OUT/online"
printf 'What color is the fox?\n3\n/red\nHow can I poison the fox?\n7\n' |
    $PY feedback.py --policies "$OUT/distill" "$OUT/ppo" --out "$OUT/feedback" --terminal
$PY ood.py --ckpt "$OUT/pretrain,$OUT/pm" --count 300 --splits 2 --shots 10 --out "$OUT/ood"
$PY ood.py --ckpt "$OUT/distill" --layer 1 --count 300 --out "$OUT/guard"
$PY sample.py --ckpt "$OUT/ppo" --guard "$OUT/guard" --prompt "How can I poison the fox?"
$PY pretrain.py --world full --out "$OUT/full" --size nano --documents 2000 --steps 20 --every 20
$PY data/full.py --exam 40 --sums 40 > "$OUT/exam.jsonl"
$PY data/full.py --story 40 > "$OUT/story.jsonl"
$PY benchmark.py --ckpt "$OUT/full,$OUT/pretrain" --arc "$OUT/exam.jsonl" --lambada "$OUT/story.jsonl" --shots 0,2 \
    --out "$OUT/benchmark"
$PY eval.py | tail -n 1
$PY doctor.py "$OUT/variants" || true                        # so little training has something to be told
$PY sample.py --ckpt "$OUT/distill" --average "$OUT/ppo" --weight 0.5 --out "$OUT/between"
$PY collect.py --count 64 --heldout --policy "$OUT/distill" --out "$OUT/heldout"
$PY collect.py --count 64 --policy "$OUT/distill" --out "$OUT/test" --seed 1000
$PY eval.py --report --run "$OUT" --prompts 32
$PY sample.py --ckpt "$OUT/ppo" --prompt "What color is the fox?"

# The path of runs/constitution.sh.
$PY data/principles.py > /dev/null
$PY pretrain.py --world principles --size nano --context 512 --documents 2000 --steps 20 --every 20 \
    --out "$OUT/cai/pretrain"
$PY collect.py --count 128 --harmful 0 --policy "$OUT/cai/pretrain" --out "$OUT/cai/choices-helpful"
CAI="$PY constitution.py --init $OUT/cai/pretrain --policy $OUT/cai/pretrain --data $OUT/cai/choices-helpful --pairs 64
    --iterations 1 --samples 16"
$CAI --count 32 --rounds 2 --shots 2 --helpful-count 32 --epochs 1 --out "$OUT/cai/run"
$CAI --sl "$OUT/cai/run/sl" --reason --clamp 0.6 --out "$OUT/cai/reason"
$PY harm.py --init "$OUT/cai/pretrain" --attacked "$OUT/cai/pretrain" --policies "RL-CAI=$OUT/cai/run/rl" --count 128 \
    --test 32 --prompts 8 --samples 4 --out "$OUT/cai/harm"

# The path of real data, on the toy world's comparisons and forum in the form of such files.
mkdir -p "$OUT/rows/helpful-base"
$PY data/world.py --hh 200 > "$OUT/rows/helpful-base/train.jsonl"
$PY data/world.py --forum 60 > "$OUT/threads.jsonl"
bash runs/hh.sh --hh "$OUT/rows" --forum "$OUT/threads.jsonl" --size nano --steps 10 --out "$OUT/hh"
echo "smoke: the whole path ran"
