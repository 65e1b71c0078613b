#!/usr/bin/env bash
# W1 on one GPU: two layers of Qwen3-235B, 16384 random tokens, in every ac mode, balanced and learned; then where the time goes.
#   benchmarks/w1.sh [ac ...]
set -u
OUT=${OUT:-$(mktemp -d)}
W1="model=qwen3_235b model.num_hidden_layers=2 parallelism.nodes=1 parallelism.gpus_per_node=1 data=random data.seq_len=16384 offload=none compile=fullgraph model.router_dtype=bf16 cluster=local logging.wandb=disabled launch.submit=false launch.json=true"
row() {  # label, overrides ...
    label=$1; shift
    run=$(python3 -m launcher $W1 launch.runs_dir="$OUT/runs" "$@" | python3 -c 'import json,sys; print(json.load(sys.stdin)["path"])')
    timeout 150 torchrun --nproc-per-node 1 -m trainer "$run" > "$OUT/$label.log" 2>&1 || tail -5 "$OUT/$label.log"
    python3 - "$label" "$run" <<'PY'
import json, sys
r = json.load(open(sys.argv[2] + "/result.json"))
s = r["step_time_s"]
print(f"{sys.argv[1]:20} {s['median']*1e3:7.1f} ms ({s['p10']*1e3:.1f}-{s['p90']*1e3:.1f})  mfu {r['mfu']:.2%}  causal {r['mfu_causal']:.2%}  hfu {r['hfu']:.2%}  "
      f"peak {r['peak_memory_gib']['allocated']:.1f} GiB  loss {r['loss']['last']:.4f}  compile {r['compile_time_s']:.1f} s")
PY
}
for ac in "${@:-full selective none}"; do for mode in $ac; do row "$mode-balanced" ac=$mode model.routing=balanced; done; done
row full-learned ac=full model.routing=learned
run=$(python3 -m launcher $W1 launch.runs_dir="$OUT/profile" ac=full model.routing=balanced | python3 -c 'import json,sys; print(json.load(sys.stdin)["path"])')
timeout 150 torchrun --nproc-per-node 1 benchmarks/profile_step.py "$run" 2>&1 | grep -E " ms " | cut -c1-150
rm -rf "$OUT/runs" "$OUT/profile"
