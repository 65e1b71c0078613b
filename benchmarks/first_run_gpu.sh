#!/usr/bin/env bash
# On one H200: the GPU tests, the two-layer Qwen3-235B run, and its losses beside the plain reference's (one layer, 4096).
set -u
OUT=${OUT:-$(mktemp -d)}
W1="model=qwen3_235b parallelism.nodes=1 parallelism.gpus_per_node=1 data=random model.routing=balanced offload=none cluster=local"
timeout 150 python3 -m launcher $W1 model.num_hidden_layers=2 data.seq_len=16384 compile=fullgraph launch.runs_dir=$OUT/w1 2>&1 | tee "$OUT/w1.log"
SMALL="$W1 model.num_hidden_layers=1 data.seq_len=4096"
timeout 100 python3 -m launcher $SMALL compile=fullgraph launch.runs_dir=/tmp/ours 2>&1 | tail -5
timeout 60 python3 -m launcher $SMALL compile=none ac=none launch.submit=false launch.runs_dir=/tmp/plain
timeout 100 python3 benchmarks/plain_reference.py /tmp/plain/*/qwen3* 2>&1 | tail -5
python3 - <<'PY' | tee "$OUT/courses.txt"
import glob, json
courses = [[json.loads(row) for row in open(glob.glob(f"/tmp/{name}/*/qwen3*/metrics.jsonl")[0])] for name in ("ours", "plain")]
for a, b in zip(*courses):
    print(f"step {a['step']:2}  loss {a['loss']:.4f} plain {b['loss']:.4f}  grad_norm {a['grad_norm']:.4f} plain {b['grad_norm']:.4f}")
PY
cp $OUT/w1/*/qwen3*/{run.json,result.json,metrics.jsonl,environment.json} "$OUT/" 2>/dev/null
cp $OUT/w1/*/qwen3*/logs/attempt_1/rank_0.log "$OUT/" 2>/dev/null
python3 -m wandb leet inspect --json $OUT/w1/*/qwen3*/wandb/*/run-*.wandb 2>/dev/null | grep -c '"mfu"' || wandb leet inspect --json $OUT/w1/*/qwen3*/wandb/*/run-*.wandb | head -c 600
rm -rf "$OUT/w1"
timeout 200 python3 -m pytest -m gpu tests/trainer -x -q 2>&1 | tail -25
