"""The messages of errors and warnings that the tests expect: regular expressions, by the package
that raises them.

A key is the beginning of the message. A reworded message changes here only.
"""

ERRORS = {
    # cli
    "no_command_help_lists_the_commands": "no command /: /help lists the commands",
    "there_is_no_command": "there is no command",
    "top_p": "top_p",
    # config
    "an_alias_of": "an alias of",
    "choose_from": "choose from",
    "did_you_mean_kv_budget": r"did you mean kv\.budget\?$",
    "distill_data_weight_has_no_effect": (
        r"distill\.data_weight has no effect while distill.data is samples"
    ),
    "generation_dry_base_has_no_effect": (
        r"generation\.dry_base has no effect .* \(the flags and the run's settings\)"
    ),
    "generation_xtc_threshold_has_no_effect": (
        r"^generation\.xtc_threshold has no effect .* \(line 3\)$"
    ),
    "has_no_effect_have_no": r"has no effect|have no effect",
    "is_now_called": "is now called",
    "is_now_called_command_line": r"is now called .* \(command line\)",
    "kv_signal_has_no_effect": r"kv\.signal has no effect while kv\.budget is null",
    "lora_alpha_has_no_effect": r"lora\.alpha has no effect while lora.rank is null",
    "max_minutes_has_no_effect": "training.max_minutes has no effect while",
    "model_num_blocks_is_3_in": (
        r"model.num_blocks is 3 in .*, got 4: leave it out \(.*a.yaml, line 4\)"
    ),
    "must_differ_from_each_other": "must differ from each other",
    "no_config_file_at": "no config file at",
    "no_config_file_at_quickstrat": (
        "no config file at quickstrat, did you mean quickstart\\? The packaged configs are"
        " addition_grpo, "
    ),
    "permutation": "permutation",
    "random_has_only_4_different": "random has only 4 different trials, but trials is 5",
    "training_lr_must_be": r"training\.lr must be",
    "training_lr_must_be_a": r"training.lr must be a number > 0, got -1 \(.*b.yaml, line 2\)",
    "training_warmup_steps_must_be_at": (
        r"training\.warmup_steps must be at most training.steps, got 5 and 2"
    ),
    "unknown_flag_kv_budget": "unknown flag --kv_budget",
    "unknown_flag_lr": "unknown flag --lr",
    "valid_unicode_text_got_ud800": r"valid Unicode text, got '.ud800' \(line 3\)",
    "warmup_steps_10_is_more_than": (
        "warmup_steps 10 is more than the 5 steps of training.epochs 1 with this corpus"
    ),
    "warmup_steps_10_line_is_more": r"warmup_steps 10 \(.*line \d+\) is more than training.steps 2",
    "which_has_no_such_step": "which has no such step: leave it out or switch it off",
    "with_step_names_excludes": "with step names excludes",
    # distributed
    "distributed_tensor_must_be_1": (
        r"distributed.tensor must be 1 with training.objective: dpo, got 2"
    ),
    "fsdp_3_expert_1_tensor": (
        "fsdp 3 × expert 1 × sequence 1 × tensor 1 is a mesh of 3 devices, but there are 8"
    ),
    "generation_tensor_parallel_must_be_at": (
        r"^generation.tensor_parallel must be at most the 8 devices of this machine, got 16$"
    ),
    "generation_tensor_parallel_must_divide_the": (
        r"^generation.tensor_parallel must divide the 4 key heads of a layer, got 8$"
    ),
    "sequence_context": (
        r"^model.max_context must be a multiple of 16 \(two chunks for each of the 8 devices .*\),"
        r" got 24$"
    ),
    "sequence_kernel": (
        "^attention.kernel must be auto or chunked with distributed.sequence 2, got xla$"
    ),
    "sequence_objective": (
        "^distributed.sequence must be 1 with training.objective: dpo, got 2: it needs next_token"
        " or sft or distill$"
    ),
    "no_rule_for_the_sharding": "no rule for the sharding of ffn/new/kernel with 2 axes",
    # faults
    "3_rewinds_to_the_same": "3 rewinds to the same checkpoint did not help",
    "cannot_write_file_too_large": r"cannot write .*: File too large",
    "cannot_write_read_only_file": r"cannot write .*Read-only file system",
    "cannot_write_read_run_the": (
        r"cannot (write|read) .*run.*: (the directory no longer exists|No such file or directory)"
    ),
    "has_no_such_array_the": (
        r": checkpoint 12 of .* has (no such array|the shape .*), this run has "
    ),
    "has_the_shape_16_in": (
        r": checkpoint 12 of .* has the shape \(.*16.*\), this run has the shape \(.*32.*\)"
    ),
    "its_corpus_has_changed_restore": "its corpus has changed: restore one of them",
    "metrics_jsonl_is_damaged_its": (
        r"metrics.jsonl is damaged: its SHA-256 .*up to step 12\): restore the original file"
    ),
    "model_weights_msgpack_is_damaged_dantinox": (
        r"model_weights.msgpack is damaged: .*dantinox verify .* --accept"
    ),
    "not_a_finite_number_in": "not a finite number in step 21 ",
    "tokens_bin_is_damaged": r"tokens-.*bin is damaged",
    "the_checkpoint_cannot_be_read_back": "^the checkpoint of step 2 in .* cannot be read back: ",
    # generation
    "tokens_of_the_prompt": r"tokens of the prompt must be in \[0, 259\), got 259",
    "embed_length": "a text to embed must have 1 to 192 tokens, got 193: shorten it",
    "embed_length_of_a_server": "a text to embed must have 1 to 192 tokens",
    "embed_pooling": "pooling must be mean or last, got 'max'",
    "embed_tensor": "embeddings need generation.tensor_parallel: 1, got 2",
    "embed_texts": "texts must be a string or a list of strings",
    "speculation_is_off_matvec": "generation.speculation is off: with 1 rows and these weights",
    "draft_run_tokenizer": (
        "^generation.draft_run runs/small must have the same tokenizer as"
        " the model, but has a different one$"
    ),
    "draft_run_context": (
        "^generation.draft_run runs/small must have a context of at least 160 tokens, got 64$"
    ),
    "draft_needs_a_run_directory": (
        "^generation.speculation: draft needs a model with a run directory$"
    ),
    "draft_needs_draft_run": (
        "^generation.speculation draft needs generation.draft_run,"
        " the run directory of the draft model"
    ),
    "draft_run_has_no_effect": (
        "generation.draft_run has no effect while generation.speculation is off"
    ),
    "most_drafts_in_this_server": (
        "^generation.draft_tokens must be at most 4 in this server, got 5$"
    ),
    "ngram_size_in_this_server": "^generation.ngram_size is 3 in this server, got 2$",
    "speculation_in_this_server": "^generation.speculation is off in this server, got ngram$",
    "generation_speculation_has_no_effect": "generation.speculation has no effect while",
    "a_job_of_4_slots": "a job of 4 slots does not fit 3 slots",
    "at_least_one_prompt_is": "at least one prompt is required",
    "cannot_read": "cannot read",
    "constraints_need_a_tokenizer_whose": (
        "constraints need a tokenizer whose tokens have the same text"
    ),
    "context_must_be_in_2": r"context must be in \[2, 320\]",
    "exists_already_choose_another_name": "exists already: choose another name",
    "generation_banned_tokens_must_have_at": (
        r"generation.banned_tokens must have at most 512 entries in a server"
    ),
    "generation_dry_base_has_no_effect_while": (
        r"generation\.dry_base has no effect while generation\.dry_multiplier is 0.0$"
    ),
    "generation_strategy_must_be_the": r"generation\.strategy must be the same",
    "generation_weights_must_be_one": (
        r"generation\.weights must be one of auto, float32, bfloat16, int8, int4, got 'int3'"
    ),
    "generation_xtc_probability_cannot_be_used": (
        r"generation\.xtc_probability cannot be used with generation\.preset hf"
    ),
    "kv_budget_0_1_is": r"kv.budget 0.1 is too small for 128 tokens: .* using 0.188",
    "kv_decay_entropy_needs_the": r"^kv.decay entropy needs the heads' entropies",
    "n_must_be_1_in": "n must be 1 in a chat, got 2",
    "n_must_be_1_in_a": r"^n must be 1 in a stream, got 4: use generate for several samples$",
    "needs_thresholds_measured_on_this": "needs thresholds measured on this model",
    "no_calibration_at": "no calibration at",
    "no_chat_template_so_it": "no chat template, so it has no system message",
    "no_token_of_this_vocabulary": "no token of this vocabulary can satisfy",
    "only_a_sample_with_log": "only a sample with log-probabilities",
    "pip_install_dantinox_serve": r"in a checkout of DantinoX, pip install -e '.\[serve\]'",
    "router_calibration_has_no_effect_unless": (
        "router_calibration has no effect unless router_preset is calibrated"
    ),
    "router_clarify_token_must_be_a": (
        r"router.clarify_token must be a token id in \[0, 67\), got 67"
    ),
    "router_low_entropy_has_no_effect": (
        "router.low_entropy has no effect while generation.strategy is chain"
    ),
    "router_use_attention_must_be_the": r"router\.use_attention must be the same",
    "same_share_set_kv_calibration_to": (
        "same share .*: set kv_calibration to the file .*, or set kv_signal to uniform"
    ),
    "score_fn_chooses_among_the_candidates": (
        "score_fn chooses among the candidates of the entropy router"
    ),
    "set_logprobs_too": "set logprobs too",
    "show_candidates": "show_candidates",
    "takes_too_long_to_evaluate": "takes too long to evaluate: simplify it",
    "the_context_of_128_tokens": (
        "the context of 128 tokens is full: the oldest turn is dropped from now on"
    ),
    "the_conversation_has_no_messages": "the conversation has no messages yet",
    "the_lark_grammar_cannot_be": "the Lark grammar cannot be used: no text satisfies it",
    "the_message_has_tokens_but": (
        r"the message has [0-9]+ tokens, but the model's context is 128: shorten it"
    ),
    "the_prompt_has_128_tokens": "the prompt has 128 tokens and fills the model's context of 128",
    "the_prompt_has_200_tokens": "the prompt has 200 tokens",
    "the_prompt_is_empty_and": "the prompt is empty and the tokenizer has no BOS token",
    "the_regex": "the regex ",
    "this_model_has_no_chat": "this model has no chat template",
    "thresholds_measured_on_this_model": "thresholds measured on this model",
    "token_98_is_not_allowed": "token 98 is not allowed here",
    "total_must_be_at_least": "total must be at least 130, got 129",
    "unknown_key_generation_temprature": r"unknown key generation\.temprature",
    # interop
    "259_tokens_do_not_correspond": "259 tokens do not correspond to the 100 rows",
    "a_tokenizer_of_the_kind": "a tokenizer of the kind WordLevel",
    "adapter_config_json_is_not_json": r"adapter_config.json (is not JSON|must hold a JSON object)",
    "adapter_model_safetensors_is_damaged": r"adapter_model.safetensors is damaged",
    "already_exists_and_is_not": "already exists and is not empty",
    "cannot_read_none_gguf_no": r"cannot read .*none.gguf: No such file",
    "dimension_sections_1_1_1_1": (
        r"dimension_sections: \[1, 1, 1, 1\], expected three numbers and a zero"
    ),
    "exp_probs_b_bias_which_is_unknown": r"exp_probs_b\.bias, which is unknown for deepseek2",
    "format_must_be_one_of": "format must be one of hf, gguf, got onnx",
    "granitemoe_rope_scaling_finetuned_false": (
        r"granitemoe\.rope\.scaling\.finetuned: false, which is not supported"
    ),
    "has_3_layers_of_which": "has 3 layers, of which 3 are multi-token prediction layers",
    "has_both_blk_0_attn_qkv": r"has both blk\.0\.attn_qkv\.weight and blk\.0\.attn_k\.weight",
    "has_learned_positions_for_1024": (
        "has learned positions for 1024 tokens: leave max_context out"
    ),
    "has_no_eos_token": "has no EOS token",
    "has_olmo_attention_layer_norm_epsilon_1e": (
        r"has olmo\.attention\.layer_norm_epsilon: 1e-06; only 1e-05 is supported"
    ),
    "has_the_tensor_blk_0": r"has the tensor blk\.0\.attn_qkv\.weight, which is unknown for",
    "is_not_a_run_with": r"is not a run with adapters: give it as --base",
    "its_projector_mmproj_and_no": (
        r"its projector \(mmproj\), and no text model: import the file of the language model"
    ),
    "join_the_parts_with_llama": "join the parts with `llama-gguf-split --merge`",
    "llama_cpp_supports_only_bpe": r"llama\.cpp supports only BPE of bytes or with byte fallback",
    "mine_gguf_already_exists": r"mine.gguf already exists",
    "model_language_model_norm_weight_and": (
        r"model\.language_model\.norm\.weight and model\.norm\.weight, which are the same tensor"
    ),
    "model_layers_2_eh_proj_weight": (
        r"model.layers.2.eh_proj.weight, which the model of its config does not have"
    ),
    "model_weights_msgpack": r"model_weights\.msgpack",
    "no_file_at_adapter_config_json": r"no file at .*adapter_config.json",
    "no_name_for_the_pre": "no name for the pre-tokenizer",
    "no_scores_of_tokens_give": "no scores of tokens give the order",
    "no_transformers_class_represents_this": "no Transformers class represents this architecture",
    "of_format_hf_must_be": (
        r"of format hf must be one of f32, f16, bf16, got q8_0 \(it belongs to gguf\)"
    ),
    "q8_0_cannot_represent": "Q8_0 cannot represent",
    "does_not_follow_llama_3": (
        r"rope_freqs\.weight, which does not follow the frequency scaling of Llama 3"
    ),
    "sha_256_of_the_checkpoint": r"has the SHA-256 .*: delete the file and import again",
    "no_projections_that_support_adapters": "no projections that support adapters",
    "sub_norms_latent": r"model\.sub_norms must be false with attention\.kv_lora_rank",
    "sub_norms_moe": r"model\.sub_norms must be false with moe\.use_moe",
    "sub_norms_tensor": r"distributed\.tensor must be 1 with model\.sub_norms, got 2",
    "bitnet_values": r"has blk\.1\.attn_q\.weight with more than three different weights",
    "bitnet_scale": r"has blk\.1\.attn_q\.weight with weights of ±1e-07, expected at least 1e-05",
    "bitnet_scale_shape": (
        r"has blk\.[17]\.attn_q\.scale of shape \[[12]\], expected one number, the scale of a"
        r" matrix"
    ),
    "bitnet_scale_value": (
        r"has the scale (0|nan) in blk\.1\.attn_q\.scale, expected a number other than 0"
    ),
    "bitnet_type": (
        r"the type \w+ cannot represent the ternary matrix blk\.\S+ with rows of (32|64) weights"
    ),
    "bitnet_untied": r"llama\.cpp's bitnet does not support model\.weight_tying: false",
    "bitnet_activation": r"GGUF's bitnet cannot represent model\.activation",
    "bitnet_float": r"GGUF's bitnet cannot represent model\.projections",
    "ternary_int4": "int4 cannot hold the scales of model.projections: ternary",
    "ternary_latent": r"model\.projections must be float with attention\.kv_lora_rank",
    "ternary_lora": r"lora\.rank must be null with model\.projections: ternary",
    "ternary_teacher": (
        "distributed.tensor must be 1 with model.projections: ternary of the teacher, got 2"
    ),
    "ternary_tensor": r"distributed\.tensor must be 1 with model\.projections: ternary, got 2",
    "clarify_ids": r"router.clarify_text must have token ids in \[0, 16\), got \[(16|-1)\]",
    "clarify_rows": "router.clarify_text needs one list of token ids per row, got 2 for 1",
    "ternary_head": "has head.weight as packed ternary weights, which only projections can have",
    "ternary_bits": "has x_proj.weight with the bits 11",
    "ternary_dtype": "has x_proj.weight as float32, expected uint8",
    "ternary_modules": (
        "modules_to_not_convert: .* in quantization_config of bitnet, expected one of"
    ),
    "ternary_no_tensor": "quant_method: bitnet, but no tensor has this format",
    "ternary_rms_norm": (
        "use_rms_norm: true in quantization_config of bitnet, expected one of false"
    ),
    "ternary_scale": r"has the scale \S+ in x_proj.weight_scale, expected at least 1e-05",
    "ternary_scale_shape": r"has x_proj.weight_scale of shape \[2\], expected \[1\]",
    "ternary_weight_bits": "weight_bits: 2; only 1 is supported",
    "the_largest_of_float16_export": "the largest of float16: export bf16 or f32",
    "the_tensor_numbers_has_the": (
        r"the tensor numbers has the type I32, expected one of F32, F16, .*, IQ1_M$"
    ),
    "this_model_has_6_layers": r"this model has 6 layers with no projections that support adapters",
    "unpack": "unpack",
    "with_shape_expected": r"with shape .*expected",
    "with_which_means_a_space": "with ▁, which means a space there",
    "x_g_idx_with_numbers_outside": r"x.g_idx with numbers outside of its 1 groups",
    "no_type_of_gguf_file": (
        r"no type of GGUF file keeps all blocks of this run \(Q4_1, Q8_0\): choose a type, such as"
    ),
    # measure
    "cannot_compile_for_a_gpu": "cannot compile for a GPU without the device",
    "pip_install_dantinox_plot": r"in a checkout of DantinoX, pip install -e '.\[plot\]'",
    "prompt_new_at_most_the": r"prompt \+ new at most the context of 32, got 1, 30 and 10",
    "u_20ac_at_position_90000": "U\\+20AC\\) at position 90000 of the text",
    # model
    "attention_kernel_cudnn_needs_a": (
        r"attention\.kernel cudnn needs a GPU, but the platform is a CPU"
    ),
    "attention_kernel_cudnn_needs_bfloat16": (
        r"attention\.kernel cudnn needs bfloat16 .* got float32 and 64"
    ),
    "attention_kernel_splash_needs_keys": (
        r"attention\.kernel splash needs keys and values of the same size"
    ),
    "attention_kernel_splash_needs_lengths": (
        r"attention\.kernel splash needs lengths that are multiples of 128, got 200"
    ),
    "needs_two_passes_over_a": "needs two passes over a prompt",
    # report
    "at_least_one_sample": "at least one sample",
    "cannot_start_no_api_key": (
        r"cannot start: no API key .with WANDB_MODE=offline it needs neither"
    ),
    "cannot_write_a_csv_no": r"cannot write .*a.csv: No such file or directory",
    "cannot_write_metrics_jsonl_no": r"cannot write .*metrics.jsonl: No space left on device",
    "has_the_columns_step_loss": (
        "has the columns step,loss, but this version writes step,train_loss"
    ),
    "is_not_a_training_log": r"log\.csv is not a training log: a cell is not a number$",
    "is_not_json_lines": r"jsonl is not JSON lines$",
    "nothing_to_plot_yet": "nothing to plot yet",
    "pip_install_dantinox_plot_2": r"in a checkout of DantinoX, pip install -e '.\[plot\]'",
    "unknown_columns_loss": "unknown columns: loss",
    "weights_biases_failed_training_continues": (
        "Weights & Biases failed, training continues without it: gone"
    ),
    # run
    "another_process_is_working_on": "another process is working on",
    "cannot_write_no_space_left": r"cannot write .*: No space left on device",
    "last_line_is_not_the": "last line is not the SHA-256",
    "manifest_txt_is_damaged_has": (
        r"manifest.txt (is damaged|has format 2, but this version reads format 1)"
    ),
    "was_measured_on_other_weights": (
        "was measured on other weights: run `dantinox calibrate --run_dir"
    ),
    "no_checkpoints_to_fine_tune": (
        r"nothing to resume at .*: it has no checkpoints; to fine-tune it, train with --init_from "
    ),
    # sampling
    "capacity_must_be_set_bad_words": "capacity must be set .*: bad_words",
    "dantinox_calibrate_or_set_router": (
        r"dantinox calibrate .* or set router\.low_entropy, .*router\.varentropy_scale$"
    ),
    "generation_strategy_entropy": r"generation\.strategy entropy",
    "must_be_a_permutation": "must be a permutation",
    "permutation_2": "permutation",
    "router_clarify_text_must_be_at_most": (
        r"router\.clarify_text must be at most 256 tokens, got 257"
    ),
    "router_clarify_text_needs_a_tokenizer": (
        r"router\.clarify_text needs a tokenizer: pass its token ids as clarify_ids"
    ),
    "router_clarify_text_cannot_be": (
        r"router\.clarify_text cannot be combined with a constraint on the output"
    ),
    "router_clarify_token_must_be_a_token": (
        r"router\.clarify_token must be a token id if there is no tokenizer, got ' \?'"
    ),
    "score_fn_must_return_one_score": (
        r"score_fn must return one score per candidate, shape \(3,\), got shape \(2?,?\)"
    ),
    "set_router_low_entropy": r"set router\.low_entropy$",
    # serve
    "another_architecture": (
        "the new weights have another architecture than the old ones: restart the server"
    ),
    "the_new_weights_need": (
        r"^the new weights need [\d.]+ GB beside the old ones, but 0.0 GB are free$"
    ),
    "the_alias": "^the alias '(a|fake)' (stands for|is already)",
    "this_server_has_no_model": "this server has no model 'llama3', only 'fake'",
    "suffix_needs_a_model": "suffix needs a model that fills in the middle of a text",
    "dimensions_must_be": r"dimensions must be in \[1, 8\], got 9",
    "byte_6": "byte 6 ",
    "draining": "draining",
    "failed": "failed",
    "failed_zerodivisionerror": "failed: ZeroDivisionError",
    "gpt_4": "gpt-4",
    "kv_budget_is_null_in": r"kv.budget is null in this server",
    "lite_must_be": "--lite must be",
    "memory": "memory",
    "regex": "regex",
    "seed": "seed",
    "takes_too_long_to_evaluate_2": "takes too long to evaluate",
    "the_engine_has_failed": "the engine has failed",
    "top_p_2": "top_p",
    "twice": "twice",
    "unclosed_group": "unclosed group",
    "zerodivisionerror": "ZeroDivisionError",
    # studies
    "a_continuation_has_128_tokens": (
        "a continuation has 128 tokens for the reference, whose context is 128"
    ),
    "a_continuation_has_200_tokens": (
        "a continuation has 200 tokens, but the model's context is 128"
    ),
    "a_task_uses_the_generation": (
        "a task uses the generation setting num_beams, which is not supported"
    ),
    "are_needed": "are needed",
    "cannot_build_a_needle_task": (
        r"cannot build a needle task from sequences of 5 tokens .*: raise --tokens"
    ),
    "cannot_write_file": r"^cannot write .*file",
    "d_d_percent_of_the": r"^\d\d % of the word 4-grams .* above 20 %, repetition hides",
    "entropy_cannot_run_without_kv_entropy": (
        r"entropy cannot run without .*kv_entropy.json: run `dantinox calibrate .*--what kv`"
    ),
    "full_is_the_baseline_of": (
        "full is the baseline of the comparison: name at least one of streaming, uniform"
    ),
    "has_0_positions_with_1000": "has 0 positions with 1000 tokens",
    "has_no_saved_training_text": "has no saved training text: select a text with --data_path",
    "has_windows_of_32_tokens": (
        r"has \d+ windows of 32 tokens within a document, but 20000 are needed, 10000 each for"
        r" tuning"
    ),
    "holds_no_loss": r"holds no loss",
    "is_not_empty_and_not": "is not empty and not a sweep",
    "kv_budget_0_1_leaves": r"kv.budget 0.1 leaves 6 slots",
    "is_not_a_regular_file": "it is not a regular file",
    "leave_room_for_a_prompt": (
        "leave room for a prompt of 8 in the model's context of 128: at most 119, got 1"
    ),
    "lm_evaluation_harness_cannot_run": (
        r"lm-evaluation-harness cannot run circle_sing: .*circle_sing"
    ),
    "notes_txt_has_1_plain": (
        r"notes.txt has 1 plain sentences and 8 words, .* need 50 and 300: .*--data_path"
    ),
    "nowhere": "nowhere",
    "plots_need_matplotlib_pip_install": (
        r"plots need matplotlib: in a checkout of DantinoX, pip install -e '.\[plot\]'"
    ),
    "router_calibrated_router_random_cannot_run_without": (
        r"router_calibrated, .*router_random cannot run without .*router.json: run `dantinox"
    ),
    "router_random_needs_the_strategy_shares": (
        "router_random needs the strategy shares of router_calibrated: name both"
    ),
    "the_reference_cannot_encode_a": (
        r"the reference cannot encode a text to score: the character 'z'"
    ),
    "trial_002_could_not_start_no": "trial_002 could not start: no corpus",
    "unknown_method_of_eval_kv": r"unknown method of eval kv 'Entrpy': did you mean entropy\?",
    "unknown_sampling_method_beam_use": (
        r"unknown sampling method 'beam': use one of greedy, temperature, .*router_random$"
    ),
    "unknown_sampling_method_minp_did": r"^unknown sampling method 'minp': did you mean min_p\?$",
    "unknown_sampling_method_router_guide": (
        "unknown sampling method 'Router-Guide': did you mean router_guide"
    ),
    "windows_of_88_tokens_within": "windows of 88 tokens within a document, but 2000 are needed",
    # text
    "have_the_same_prompt": (
        r"all records of .*a\.jsonl have the same prompt: kto needs completions of at least two"
        r" prompts"
    ),
    "lacks_the_field_label": (
        r"a record lacks the field 'label'; it has 'prompt, completion' \(.*line 1\)"
    ),
    "lacks_the_field_prompt": r"a record lacks the field 'prompt'; it has 'messages' \(.*line 1\)",
    "fill_in_the_middle": (
        "cannot fill in the middle of a text: its vocabulary has no fill-in-the-middle tokens"
    ),
    "a_record_lacks_the_field": (
        r"a record lacks the field 'chosen'; it has 'prompt, completion' \(.*line 1\)"
    ),
    "a_socket": "a socket",
    "a_source_of_the_mixture": (
        "a source of the mixture has 4 training tokens, fewer than the 5 of a window"
    ),
    "a_txt_is_plain_text": (
        r"a.txt is plain text: conversations must be records of JSON Lines \(.jsonl\)"
    ),
    "all_conversations_are_longer_than": r"all training conversations are longer than model.max_context 2",
    "cannot_read_a_txt_permission": r"cannot read .*a\.txt: Permission denied",
    "cannot_write_the_tokens_in": r"cannot write the tokens in .*a\.txt",
    "changed_while_it_was_read": "changed while it was read",
    "data_mixture_must_have_one": (
        r"data\.mixture must have one number per entry of data\.path, got 3 for 2"
    ),
    "data_path_data_path": r"data\.path.*--data_path",
    "does_not_support_training_on": (
        "does not support training on single turns: a turn of the assistant does not"
    ),
    "has_no_complete_checkpoint_but": (
        "checkpoints has no complete checkpoint, but the run has trained 24 steps"
    ),
    "kto_needs_training_init_from_the": (
        r"training.objective kto needs training.init_from, the run with the starting weights"
    ),
    "dpo_needs_training_init_from_the": (
        r"dpo needs training.init_from, the run with the starting weights"
    ),
    "found_no_document_with_at": "found no document with at least two tokens",
    "has_10_tokens_fewer_than": "has 10 tokens, fewer than the 17 of one batch",
    "has_12_tokens_fewer_than": r"has 12 tokens, fewer than the 13 of one batch .*3 × .*4 \+ 1",
    "has_too_few_conversations_1": r"has too few conversations: 1, the minimum is 2",
    "longer_than_20_bytes_line": r"longer than 20 bytes .*line 2",
    "no_chat_template_other_name": (
        r"^no chat template 'other': name a Jinja file or one of plain, bare, chatml$"
    ),
    "no_space_left_on_device": "No space left on device",
    "no_such_file": "No such file",
    "the_chat_template_chatml_needs": (
        r"the chat template chatml needs a vocabulary with <\|im_start\|>"
    ),
    "does_not_write_the_last_message": (
        "does not write the last message, so that it cannot be continued"
    ),
    "the_chat_template_refuses_these": (
        r"^the chat template refuses these messages: System role not supported$"
    ),
    "the_dataset_somebody_corpus_needs": (
        r"the dataset somebody/corpus needs .*in a checkout of DantinoX, pip install -e '.\[hf\]'"
    ),
    "tokenizer_json_is_not_a": r"tokenizer\.json is not (a valid tokenizer\.json: |UTF-8 text)",
    "training_objective_sft_does_not": (
        r"training.objective: sft does not train a tokenizer: set training.init_from"
    ),
    "u_00df_at_position_100": r"'ß' \(U\+00DF\) at position 100 ",
    "u_00df_at_position_4": r"'ß' \(U\+00DF\) at position 4 ",
    "u_1f600_at_position_0": r"'😀' \(U\+1F600\) at position 0 ",
    "u_d83d_at_position_2": r"U\+D83D at position 2 ",
    "unknown_corpus_builtin_memory_did": (
        r"unknown corpus builtin:memory, did you mean builtin:python, builtin:recall, "
    ),
    "validation_text_has_1_tokens": "validation text has 1 tokens, fewer than 2",
    # files, settings and the package layout
    "cannot_read_it_no_such": r"^cannot read it: No such file or directory$",
    "it_pip_install_dantinox_plot": r"^it: in a checkout of DantinoX, pip install -e '.\[plot\]'$",
    # training
    "all_checkpoints_in_are_damaged": (
        r"all checkpoints in .* are damaged: .*24/state/manifest.ocdbt is damaged"
    ),
    "distill_teacher_the_run": (
        r"^distill\.teacher: the run .* has tokenizer [0-9a-f]{12}, this run has"
    ),
    "hold_with_shape": r"hold .*with shape",
    "init_from_has_tokenizer": r"init_from.* has tokenizer",
    "longer_than_the_context_of": (
        r"^model\.max_context 17 is longer than the context of the teacher .*, 16: lower it"
    ),
    "must_be_set_the_vocabulary": (
        "must be set: the vocabulary has neither a line break nor a BOS token"
    ),
    "needs_about_2_00_gb": (
        r"needs about 2\.00 GB .* 1\.00 GB are free: raise training\.grad_accum .*batch_size"
    ),
    "not_a_finite_number_in_step": (
        r"not a finite number in step 10 .*the last good checkpoint is step 6"
    ),
    "only_the_number_of_layers": "only the number of layers may be smaller",
    "restore_reference_json": r"restore reference.json",
    "supports_neither_a_cache_nor": "supports neither a cache nor a probe",
    "the_adapters_of_tuned_were": (
        r"the adapters of .*tuned were trained on the weights [0-9a-f]{12}…, but its base .* has"
    ),
    "the_base_of_tuned_is": (
        r"the base of .*tuned is missing: there is no run at /nowhere/base or .*/base"
    ),
    "the_loss_never_fell_from": r"the loss never fell, starting at training\.lr 0\.1: lower it",
    "tries_must_be_at_least": "--tries must be at least 10, got 3",
    "was_trained_on_weights_0": (
        r"was trained on weights [0-9a-f]{12} .*training.init_from.*, but that run now has"
    ),
    "was_trained_with_a_teacher": (
        r"with a teacher of weights [0-9a-f]{12} .*distill.teacher.*, but that run now has"
    ),
    "was_trained_with_tokenizer_000000000000": (
        "was trained with tokenizer 000000000000, the run directory now has 111111111111"
    ),
}
