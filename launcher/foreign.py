"""Keys of other stacks (prime-rl, torchtitan, hydra-submitit-launcher) and what the same wish is called here.

They are refused, never translated: whoever pastes a recipe should see what each line means here.
"""

from __future__ import annotations

NO_COUNTERPART = "has no counterpart here"

# Whole overrides that are refused although their group exists.
VALUES = {
    "offload=fsdp": "offload=full (masters, moments and gradients in host memory; there is no FSDP CPU offload)",
    "offload=cpu": "offload=full",
    "hydra/launcher=submitit_slurm": "cluster=slurm",
    "hydra/launcher=submitit_local": "cluster=local",
    "hydra/launcher=slurm": "cluster=slurm",
    "hydra/launcher=local": "cluster=local",
}

# The longest matching key counts; a key that ends in "." stands for everything below it.
KEYS = {
    # prime-rl
    "model.optim_cpu_offload": "offload=optimizer, or offload=none for false",
    "model.fsdp_cpu_offload": "offload=full (there is no FSDP CPU offload)",
    "model.full_offload": "offload=full",
    "model.full_offload.": "offload=full",
    "model.offload": "offload=none|optimizer|full",
    "model.ac": "ac=none|selective|full",
    "model.ac.": "ac=none|selective|full",
    "model.ac_offloading": NO_COUNTERPART + ": ac=full keeps block inputs on the GPU",
    "model.ac_offloading.": NO_COUNTERPART + ": ac=full keeps block inputs on the GPU",
    "model.compile": "compile=none|block|fullgraph",
    "model.compile.": "compile=fullgraph, or compile=block to allow graph breaks",
    "model.ep": "parallelism.ep",
    "model.dp_replicate": "parallelism.dp_replicate",
    "model.cp": NO_COUNTERPART + ": use more nodes",
    "model.tp": NO_COUNTERPART + ": use parallelism.ep",
    "model.moe_router_dtype": "model.router_dtype=bf16|fp32",
    "model.optimization_dtype": "train.param_dtype=bf16|fp32 (masters and moments are fp32 always)",
    "model.reduce_dtype": "train.grad_dtype=bf16|fp32",
    "model.seq_len": "data.seq_len",
    "model.freeze_moe_router": "'model.freeze=[\"*.mlp.gate.*\"]'",
    "model.debug.num_layers": "model.num_hidden_layers",
    "model.debug.force_balanced_routing": "model.routing=balanced",
    "model.debug.random_init": "model.weights= (empty: random weights)",
    "model.lora": NO_COUNTERPART,
    "model.lora.": NO_COUNTERPART,
    "model.attn": NO_COUNTERPART + ": the attention kernel follows from the device",
    "model.impl": NO_COUNTERPART + ": there is one implementation",
    "optim.type": "optimizer=adamw|muon|sign_sgd",
    "optim.lr": "optimizer.lr",
    "optim.weight_decay": "optimizer.weight_decay",
    "optim.max_norm": "optimizer.clip_norm",
    "optim.betas1": "optimizer.beta1",
    "optim.betas2": "optimizer.beta2",
    "optim.mu": "optimizer.momentum",
    "optim.": "the group optimizer",
    "scheduler.type": "schedule=constant|linear|cosine|wsd",
    "scheduler.": "schedule.warmup_steps, schedule.decay_steps or schedule.min_lr",
    "data.batch_size": "data.global_batch_size",
    "data.type": "data=random (for fake) or data=chat (for sft)",
    "data.num_workers": NO_COUNTERPART,
    "ckpt.interval": "checkpoint.every_steps",
    "ckpt.keep_last": "checkpoint.keep",
    "ckpt": "checkpoint.every_steps",
    "ckpt.": "checkpoint.every_steps or checkpoint.keep",
    "max_steps": "train.steps",
    "wandb.project": "logging.project",
    "wandb.name": "logging.run_name",
    "wandb.": "the group logging",
    "monitors.wandb": "logging.wandb=online|offline|disabled",
    "monitors.wandb.project": "logging.project",
    "monitors.wandb.name": "logging.run_name",
    "monitors.": "the group logging",
    "deployment.num_train_nodes": "parallelism.nodes",
    "deployment.gpus_per_node": "parallelism.gpus_per_node",
    "deployment.num_train_gpus": "parallelism.gpus_per_node",
    "deployment.": "parallelism.nodes and parallelism.gpus_per_node",
    "slurm": "cluster=slurm",
    "slurm.": "the group cluster (cluster.partition, cluster.account, ...)",
    "env_vars.": "cluster.env.NAME=VALUE",
    "output_dir": "launch.runs_dir",
    "run.name": "launch.name",
    "dry_run": "launch.dry_run=true",
    "dist_timeout": "train.stall_timeout_s",
    # torchtitan
    "training.steps": "train.steps",
    "training.seq_len": "data.seq_len",
    "training.local_batch_size": "data.micro_batch_size",
    "training.global_batch_size": "data.global_batch_size",
    "training.max_norm": "optimizer.clip_norm",
    "training.enable_cpu_offload": "offload=full",
    "training.mixed_precision_param": "train.param_dtype=bf16|fp32",
    "training.dtype": "train.param_dtype=bf16|fp32",
    "training.mixed_precision_reduce": "train.grad_dtype=bf16|fp32",
    "training.seed": "train.seed",
    "training.dataset": "data=sample|random|chat",
    "training.dataset_path": "data=chat data.path=...",
    "training.": "the groups train and data",
    "debug.seed": "train.seed",
    "debug.moe_force_load_balance": "model.routing=balanced",
    "parallelism.data_parallel_replicate_degree": "parallelism.dp_replicate",
    "parallelism.data_parallel_shard_degree": "parallelism.dp_shard",
    "parallelism.expert_parallel_degree": "parallelism.ep",
    "parallelism.tensor_parallel_degree": NO_COUNTERPART + ": use parallelism.ep",
    "parallelism.pipeline_parallel_degree": NO_COUNTERPART,
    "parallelism.context_parallel_degree": NO_COUNTERPART + ": use more nodes",
    "parallelism.expert_tensor_parallel_degree": NO_COUNTERPART + ": use parallelism.ep",
    "activation_checkpoint.": "ac=none|selective|full",
    "compile.enable": "compile=block, or compile=none for false",
    "compile.fullgraph": "compile=fullgraph",
    "lr_scheduler.warmup_steps": "schedule.warmup_steps",
    "lr_scheduler.decay_type": "schedule=linear|cosine",
    "lr_scheduler.decay_ratio": "schedule.decay_steps",
    "lr_scheduler.min_lr_factor": "schedule.min_lr",
    "lr_scheduler.": "the group schedule",
    "checkpoint.enable": "checkpoint.every_steps (0: none)",
    "checkpoint.interval": "checkpoint.every_steps",
    "checkpoint.keep_latest_k": "checkpoint.keep",
    "checkpoint.initial_load_path": "model.weights",
    "checkpoint.folder": "launch.runs_dir",
    "metrics.enable_wandb": "logging.wandb=online|offline|disabled",
    "metrics.": "the group logging",
    "job.dump_folder": "launch.runs_dir",
    "job.description": "launch.name",
    "comm.train_timeout_seconds": "train.stall_timeout_s",
    # hydra-submitit-launcher
    "hydra.launcher.nodes": "parallelism.nodes",
    "hydra.launcher.gpus_per_node": "parallelism.gpus_per_node",
    "hydra.launcher.tasks_per_node": "parallelism.gpus_per_node (one process a GPU)",
    "hydra.launcher.timeout_min": "cluster.time_limit_min",
    "hydra.launcher.mem_gb": "cluster.mem",
    "hydra.launcher.cpus_per_task": "cluster.cpus_per_task",
    "hydra.launcher.partition": "cluster.partition",
    "hydra.launcher.account": "cluster.account",
    "hydra.launcher.qos": "cluster.qos",
    "hydra.launcher.constraint": "cluster.constraint",
    "hydra.launcher.gres": "cluster.gres",
    "hydra.launcher.exclusive": "cluster.exclusive",
    "hydra.launcher.setup": "cluster.setup",
    "hydra.launcher.srun_args": "cluster.srun_args",
}


def spelling_here(key: str, value: str) -> str | None:
    """What an override of another stack is called here; None if it is not known from one."""
    whole = VALUES.get(f"{key}={value}")
    if whole:
        return whole
    if key in KEYS:
        return KEYS[key]
    parts = key.split(".")
    for length in range(len(parts) - 1, 0, -1):
        below = ".".join(parts[:length]) + "."
        if below in KEYS:
            return KEYS[below]
    return None
