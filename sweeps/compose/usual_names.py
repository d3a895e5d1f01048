"""What other programs call our keys, so that their names lead to ours."""

from __future__ import annotations

from collections.abc import Collection
from functools import cache

USUAL = {
    "optim.lr": "learning_rate learningrate base_lr max_lr peak_lr init_lr max_learning_rate peak_learning_rate",
    "optim.name": "optimizer optimizer_name optimizer_type",
    "optim.weight_decay": "wd l2",
    "optim.beta1": "adam_beta1 adam_b1 b1 betas",
    "optim.beta2": "adam_beta2 adam_b2 b2 betas",
    "optim.eps": "epsilon adam_eps adam_epsilon",
    "optim.clip": "grad_clip clip_grad max_grad_norm gradient_clip gradient_clipping clip_grad_norm max_norm",
    "schedule.decay": "scheduler lr_scheduler lr_scheduler_type lr_schedule lr_decay_style",
    "schedule.final_rate": "min_lr eta_min lr_min",
    "schedule.warmup": "warmup_steps warmup_iters num_warmup_steps lr_warmup_steps",
    "schedule.warmup_share": "warmup_ratio warmup_fraction",
    "train.steps": "epochs num_epochs num_train_epochs max_epochs max_steps num_steps train_steps total_steps iters "
    "max_iters iterations num_iterations",
    "train.batch": "batch_size bs global_batch_size train_batch_size per_device_train_batch_size",
    "train.micro_batches": "gradient_accumulation_steps grad_accum accumulate_grad_batches accumulation_steps "
    "grad_accum_steps num_micro_batches",
    "train.precision": "dtype torch_dtype fp16 bf16 amp mixed_precision",
    "train.checkpointing": "gradient_checkpointing activation_checkpointing grad_checkpoint",
    "train.validate_every": "eval_every eval_interval eval_steps val_interval",
    "train.z_loss": "z_loss_weight z_loss_coef",
    "model.width": "hidden_size hidden_dim d_model dim n_embd embed_dim embedding_dim emb_dim model_dim",
    "model.depth": "n_layer n_layers num_layers num_hidden_layers num_blocks layers",
    "model.head_dim": "n_head n_heads num_heads num_attention_heads heads head_size",
    "model.context": "block_size seq_len seq_length sequence_length context_length context_size max_seq_len "
    "max_seq_length max_position_embeddings n_positions n_ctx",
    "model.expansion": "mlp_ratio ffn_mult intermediate_size d_ff ffn_dim n_inner",
    "model.dropout": "dropout_rate dropout_prob dropout_p attn_dropout resid_dropout hidden_dropout",
    "model.tied_head": "tie_word_embeddings tie_embeddings weight_tying tied_embeddings",
    "model.init_std": "initializer_range init_scale",
    "model.rotary_base": "rope_theta rope_base",
    "model.norm_epsilon": "rms_norm_eps layer_norm_eps layer_norm_epsilon norm_eps",
    "model.biases": "bias use_bias",
    "data.vocabulary": "vocab_size vocab n_vocab",
    "data.source": "dataset dataset_name corpus",
    "data.path": "data_dir data_path dataset_path",
    "moe.experts": "num_experts n_experts num_local_experts n_routed_experts",
    "moe.top": "top_k num_experts_per_tok",
    "seed": "random_seed rng_seed",
    "out": "output_dir out_dir output save_dir log_dir logdir run_dir",
    "device": "accelerator gpu cuda",
    "checkpoint.every": "save_every save_steps save_interval checkpoint_every",
}
"""key -> the names that it has elsewhere."""
UNLIKE = {
    "epochs num_epochs num_train_epochs max_epochs": "a run is as long as its steps",
    "n_head n_heads num_heads num_attention_heads heads": "heads are model.width / model.head_dim",
    "intermediate_size d_ff ffn_dim n_inner": "of model.width",
}
"""What has to be known where another quantity is meant by the name."""


@cache
def _keys_by_name() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for key, names in USUAL.items():
        for name in names.split():
            found.setdefault(name, []).append(key)
    return found


def usual(key: str, known: Collection[str]) -> tuple[list[str], str]:
    """The keys among `known` that others call by the last part of `key`, and what to know of them; else nothing."""
    name = key.rpartition(".")[2].lower().replace("-", "_")
    keys = [ours for ours in _keys_by_name().get(name, ()) if ours in known]
    notes = [note for names, note in UNLIKE.items() if keys and name in names.split()]
    return keys, "".join(f" ({note})" for note in notes)
