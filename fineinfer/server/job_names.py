"""Settings by the names that other tools give them, and those that exist elsewhere only, with the reason."""

from __future__ import annotations

from typing import Any

# our name: what axolotl, Together, TRL, PEFT and LLaMA-Factory call it
_THEIR_NAMES = {
    "lora.r": "lora_r lora_rank rank r",
    "lora.alpha": "lora_alpha alpha",
    "lora.dropout": "lora_dropout dropout",
    "lora.target_modules": "lora_target_modules lora_trainable_modules lora_target lora_target_linear target_modules",
    "lora.rslora": "use_rslora peft_use_rslora rslora",
    "lora.rank_pattern": "rank_pattern",
    "lora.alpha_pattern": "alpha_pattern",
    "n_epochs": "epochs num_epochs num_train_epochs",
    "batch_size": "micro_batch_size per_device_train_batch_size train_batch_size",
    "learning_rate": "lr",
    "lr_scheduler": "lr_scheduler_type scheduler scheduler_type",
    "min_lr_ratio": "lr_min_ratio cosine_min_lr_ratio",
    "warmup_ratio": "warmup_steps num_warmup_steps lr_warmup_steps",
    "max_grad_norm": "gradient_clipping max_norm clip_grad_norm",
    "gradient_accumulation_steps": "grad_accum_steps gradient_accumulation",
    "max_seq_length": "sequence_len max_length cutoff_len seq_length",
    "save_steps": "n_checkpoints saves_per_epoch save_every save_strategy",
    "eval_steps": "n_evals evals_per_epoch eval_every eval_strategy",
    "early_stopping": "early_stopping_enabled",
    "early_stopping.patience": "early_stopping_patience",
    "early_stopping.min_delta": "early_stopping_min_delta early_stopping_threshold",
    "early_stopping.warmup_evals": "early_stopping_warmup_evals",
    "validation_split": "val_set_size val_size test_size validation_ratio",
    "train_on": "train_on_inputs completion_only_loss assistant_only_loss roles_to_train train_on_prompt mask_history",
    "packing": "sample_packing neat_packing",
    "from_checkpoint": "resume_from_checkpoint init_from lora_model_dir adapter_name_or_path",
    "max_gpu_share": "max_share train_share gpu_share",
    "serve_while_training": "serve serving",
    "seed": "random_seed",
    "model": "base_model model_name_or_path",
    "training_file": "train_file train_dataset datasets dataset",
    "validation_file": "validation_data eval_file eval_dataset test_datasets",
    "suffix": "name wandb_name output_name hub_model_id",
    "integrations": "report_to wandb_project",
}
OUR_NAMES: dict[str, str] = {theirs: ours for ours, names in _THEIR_NAMES.items() for theirs in names.split()}
LORA_NAMES: dict[str, str] = {
    "rank": "r", "lora_r": "r", "lora_alpha": "alpha", "lora_dropout": "dropout", "use_rslora": "rslora",
    "init_lora_weights": "init", "use_dora": "dora", "targets": "target_modules",
}  # fmt: skip
_QUANTISED = ((False, "none"), "the base model is shared with serving and is not quantised")
_STOCK = "the stock servers cannot load such adapters"
_ADAMW = (("adamw", "adamw_torch", "adamw_torch_fused"), "AdamW is used")
# name: (values that ask for nothing, the reason why others are refused)
REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    **dict.fromkeys(("load_in_4bit", "load_in_8bit", "quantization", "quantization_config"), _QUANTISED),
    "quantization_bit": _QUANTISED,
    "adapter": (("lora",), "jobs train LoRA adapters; QLoRA would need a quantised base model"),
    **dict.fromkeys(("training_type", "finetuning_type"), (("lora",), "jobs train adapters; `lora` describes them")),
    "dora": ((False,), "it slows serving down, and other engines refuse it"),
    "bias": (("none",), f"biases belong to the base model, which all adapters share; {_STOCK}"),
    "lora_bias": ((False,), _STOCK),
    "modules_to_save": (([],), f"whole layers beside an adapter cannot be served on a shared base model; {_STOCK}"),
    "layer_replication": (([],), "the layers of the base model are shared by all adapters"),
    "trainable_token_indices": (([], {}), "embeddings belong to the base model, which all adapters share"),
    "layers_to_transform": (([],), "adapters cover every layer; lora.rank_pattern gives single ones another rank"),
    "exclude_modules": (([],), "lora.target_modules names what is adapted"),
    **dict.fromkeys(("optimizer", "optim"), _ADAMW),
    "max_steps": ((-1, 0), "n_epochs says how long a job trains"),
}  # fmt: skip
# prefixes of PEFT's `init_lora_weights`
INITS = {
    **dict.fromkeys(("pissa", "olora", "corda", "loftq"), "it changes the base weights, which all adapters share"),
    "eva": "it needs a pass over the data before training, which there is not",
}
