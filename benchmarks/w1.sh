#!/usr/bin/env bash
# W1 on one GPU: two layers of Qwen3-235B, 16384 random tokens. A row: its label (ac mode, routing, packed or not), then
# overrides. Without arguments every row of RESULTS.md; with PROFILE=1 also where each row's time goes.
#   benchmarks/w1.sh ["full-learned ac=full model.routing=learned" ...]
# W3: MODEL="model=qwen3_30b_a3b model.num_hidden_layers=8" benchmarks/w1.sh
set -u
OUT=${OUT:-$(mktemp -d)}
W1="${MODEL:-model=qwen3_235b model.num_hidden_layers=2} parallelism.nodes=1 parallelism.gpus_per_node=1 data=random data.seq_len=16384 offload=none compile=fullgraph model.router_dtype=bf16 model.routing=balanced cluster=local logging.wandb=disabled launch.submit=false launch.json=true"
path() { python3 -W ignore -c 'import json,sys; print(json.load(sys.stdin)["path"])'; }
row() {  # label, overrides ...
    label=$1; shift
    run=$(python3 -W ignore -m launcher $W1 launch.runs_dir="$OUT/runs" "$@" 2> "$OUT/$label.log" | path) || cat "$OUT/$label.log"
    timeout 150 torchrun --nproc-per-node 1 -m trainer "$run" > "$OUT/$label.log" 2>&1 || tail -5 "$OUT/$label.log"
    python3 - "$label" "$run" <<'PY'
import json, sys
r = json.load(open(sys.argv[2] + "/result.json"))
s = r["step_time_s"]
print(f"{sys.argv[1]:20} {s['median']*1e3:7.1f} ms ({s['p10']*1e3:.1f}-{s['p90']*1e3:.1f})  mfu {r['mfu']:.2%}  causal {r['mfu_causal']:.2%}  hfu {r['hfu']:.2%}  "
      f"peak {r['peak_memory_gib']['allocated']:.1f} GiB  loss {r['loss']['last']:.4f}  compile {r['compile_time_s']:.1f} s")
PY
    if [ -n "${PROFILE:-}" ]; then
        run=$(python3 -W ignore -m launcher $W1 launch.runs_dir="$OUT/profile" train.steps=12 "$@" | path)
        timeout 150 torchrun --nproc-per-node 1 benchmarks/profile_step.py "$run" > "$OUT/$label.profile" 2>&1
    fi
}
[ $# -gt 0 ] || set -- "full ac=full" "selective ac=selective" "none ac=none" "full-learned ac=full model.routing=learned" \
    "full-packed ac=full data.document_len=4096" "none-packed ac=none data.document_len=4096"
for arguments in "$@"; do row $arguments; done
rm -rf "$OUT/runs" "$OUT/profile"
