"""Requests that widely used clients send with their default settings, as (path, body); the texts
are shortened.
"""

import json

from .test_kobold import LITE

MESSAGES = [{"role": "system", "content": "count"}, {"role": "user", "content": "once"}]
BREAKERS = ["\n", ":", '"', "*"]
# The fields that SillyTavern sends to every text-completion server.
TAVERN = {
    "prompt": "once", "model": "fake", "max_new_tokens": 8, "max_tokens": 8, "temperature": 0.7,
    "top_p": 0.5, "typical_p": 1, "typical": 1, "sampler_seed": -1, "min_p": 0,
    "repetition_penalty": 1.2, "frequency_penalty": 0, "presence_penalty": 0, "top_k": 40,
    "skew": 0, "min_tokens": 0, "add_bos_token": True, "smoothing_factor": 0, "smoothing_curve": 1,
    "dry_allowed_length": 2, "dry_multiplier": 0, "dry_base": 1.75, "dry_penalty_last_n": 0,
    "max_tokens_second": 0, "stopping_strings": ["\nUser:"], "stop": ["\nUser:"],
    "truncation_length": 8192, "ban_eos_token": False, "skip_special_tokens": True,
    "include_reasoning": True, "top_a": 0, "tfs": 1, "mirostat_mode": 0, "mirostat_tau": 5,
    "mirostat_eta": 0.1, "custom_token_bans": "", "banned_strings": [],
    "api_server": "http://127.0.0.1:8000/", "xtc_threshold": 0.1, "xtc_probability": 0, "nsigma": 0,
    "top_n_sigma": 0, "min_keep": 0, "adaptive_target": -0.01, "adaptive_decay": 0.9,
    "rep_pen": 1.2, "rep_pen_range": 0, "repetition_penalty_range": 0, "guidance_scale": 1,
    "negative_prompt": "", "repeat_penalty": 1.2, "repeat_last_n": 0, "n_predict": 8,
    "num_predict": 8, "num_ctx": 8192, "mirostat": 0, "ignore_eos": False, "rep_pen_slope": 1,
    "stream": False,
}  # fmt: skip
TAVERN_SAMPLERS = [
    "penalties", "dry", "top_n_sigma", "top_k", "typ_p", "tfs_z", "typical_p", "xtc", "top_p",
    "min_p", "temperature",
    "adaptive_p",
]  # fmt: skip
# The fields that llama.vim sends with a request for a completion, and with one that only fills the
# cache.
VIM = {
    "id_slot": 0, "input_prefix": "a\n", "input_suffix": "\nb",
    "input_extra": [{"filename": "x", "text": "c"}], "prompt": "d", "n_predict": 8, "stop": [],
    "n_indent": 0, "top_k": 40, "top_p": 0.9, "stream": False,
    "samplers": ["top_k", "top_p", "infill"], "cache_prompt": True, "t_max_prompt_ms": 500,
    "t_max_predict_ms": 1000,
    "response_fields": [
        "content", "timings/prompt_n", "timings/prompt_ms", "timings/prompt_per_token_ms",
        "timings/prompt_per_second", "timings/predicted_n", "timings/predicted_ms",
        "timings/predicted_per_token_ms", "timings/predicted_per_second", "truncated",
        "tokens_cached",
    ],
}  # fmt: skip
VIM_CACHE = {
    "input_suffix": "",
    "input_prefix": "",
    "prompt": "",
    "n_predict": 0,
    "t_max_predict_ms": 1,
    "response_fields": [""],
}
OPEN_WEBUI_OPTIONS = {
    "temperature": 0.8, "top_p": 0.9, "top_k": 40, "min_p": 0.0, "seed": 3, "mirostat": 0,
    "mirostat_eta": 0.1, "mirostat_tau": 5.0, "repeat_last_n": 64, "repeat_penalty": 1.1,
    "presence_penalty": 0, "frequency_penalty": 0, "num_ctx": 2048, "num_batch": 512,
    "num_keep": 24, "num_predict": 8, "num_gpu": 1, "num_thread": 2, "use_mmap": True,
    "use_mlock": False, "stop": ["\n\n"],
}  # fmt: skip

PAYLOADS = {
    "SillyTavern, llama.cpp": (
        "/completion",
        TAVERN
        | {
            "api_type": "llamacpp",
            "samplers": TAVERN_SAMPLERS,
            "n": 1,
            "logit_bias": [],
            "grammar": "",
            "cache_prompt": True,
        }
        | {"dry_sequence_breakers": BREAKERS},
    ),
    "SillyTavern, KoboldCpp": (
        "/v1/completions",
        TAVERN
        | {"api_type": "koboldcpp", "sampler_order": [6, 0, 1, 3, 4, 2, 5], "trim_stop": True}
        | {"dry_sequence_breakers": BREAKERS},
    ),
    "SillyTavern, generic": (
        "/v1/completions",
        TAVERN | {"api_type": "generic", "dry_sequence_breakers": json.dumps(BREAKERS)},
    ),
    "SillyTavern, KoboldAI": (
        "/api/extra/generate/stream",
        {
            "prompt": "once",
            "gui_settings": False,
            "sampler_order": [6, 0, 1, 2, 3, 4, 5],
            "max_context_length": 2048,
        }
        | {
            "max_length": 8,
            "rep_pen": 1.1,
            "rep_pen_range": 1024,
            "rep_pen_slope": 0.9,
            "temperature": 1,
            "tfs": 0.95,
        }
        | {
            "top_a": 0,
            "top_k": 0,
            "top_p": 0.95,
            "min_p": 0,
            "typical": 1,
            "use_world_info": False,
            "singleline": False,
        }
        | {
            "stop_sequence": ["\nUser:"],
            "streaming": True,
            "can_abort": True,
            "mirostat": 0,
            "mirostat_tau": 5,
        }
        | {
            "mirostat_eta": 0.1,
            "use_default_badwordsids": False,
            "grammar": "",
            "sampler_seed": None,
        },
    ),
    "SillyTavern, chat": (
        "/v1/chat/completions",
        {
            "messages": MESSAGES,
            "model": "fake",
            "temperature": 1,
            "max_tokens": 8,
            "stream": True,
            "presence_penalty": 0,
        }
        | {"frequency_penalty": 0, "top_p": 1, "stop": []},
    ),
    "Kobold Lite": ("/api/extra/generate/stream", LITE | {"max_length": 8, "prompt": "once"}),
    "llama.vim": ("/infill", VIM),
    "llama.vim, filling the cache": ("/infill", VIM | VIM_CACHE),
    "llama.vscode": ("/infill", VIM | {"top_p": 0.99, "n_cmpl": 3, "model": "fake"}),
    "llama.vscode, chat": (
        "/v1/chat/completions",
        {
            "id_slot": 0,
            "messages": MESSAGES,
            "stream": False,
            "temperature": 0.8,
            "top_p": 0.95,
            "samplers": "edkypmxt",
        }
        | {
            "dynatemp_range": 0,
            "dynatemp_exponent": 1,
            "top_k": 40,
            "min_p": 0.05,
            "typical_p": 1,
            "xtc_probability": 0,
        }
        | {
            "xtc_threshold": 0.1,
            "repeat_last_n": 64,
            "repeat_penalty": 1,
            "presence_penalty": 0,
            "frequency_penalty": 0,
        }
        | {
            "dry_multiplier": 0,
            "dry_base": 1.75,
            "dry_allowed_length": 2,
            "dry_penalty_last_n": -1,
            "max_tokens": 8,
        }
        | {"timings_per_token": False, "cache_prompt": True},
    ),
    "Open WebUI, Ollama": (
        "/api/chat",
        {
            "model": "fake:latest",
            "messages": MESSAGES,
            "options": OPEN_WEBUI_OPTIONS,
            "stream": True,
            "keep_alive": "5m",
        },
    ),
    "Open WebUI, OpenAI": (
        "/v1/chat/completions",
        {
            "stream": True,
            "model": "fake",
            "messages": MESSAGES,
            "stream_options": {"include_usage": True},
            "seed": 3,
        }
        | {
            "temperature": 0.8,
            "top_p": 0.9,
            "frequency_penalty": 0,
            "max_tokens": 8,
            "stop": ["\n\n"],
            "logit_bias": {},
        },
    ),
    "Open WebUI, title": (
        "/v1/chat/completions",
        {"model": "fake", "messages": MESSAGES[1:], "stream": False, "max_completion_tokens": 8},
    ),
    "continue.dev, OpenAI": (
        "/v1/chat/completions",
        {
            "messages": MESSAGES,
            "model": "fake",
            "max_tokens": 8,
            "stream": True,
            "parallel_tool_calls": False,
        }
        | {"stream_options": {"include_usage": True}},
    ),
    "continue.dev, llama.cpp": (
        "/completion",
        {
            "prompt": "once",
            "stream": True,
            "n_predict": 8,
            "top_k": 40,
            "top_p": 0.9,
            "min_p": 0.05,
            "mirostat": 0,
        }
        | {
            "presence_penalty": 0,
            "frequency_penalty": 0,
            "temperature": 0.01,
            "stop": ["<|endoftext|>", "\n\n"],
        },
    ),
    "continue.dev, Ollama": (
        "/api/generate",
        {
            "model": "fake",
            "prompt": "<fim_prefix>a<fim_suffix>b<fim_middle>",
            "raw": True,
            "keep_alive": 1800,
            "stream": True,
        }
        | {
            "options": {
                "num_predict": 8,
                "num_ctx": 4096,
                "temperature": 0.01,
                "stop": ["<fim_prefix>", "\n\n"],
            }
        },
    ),
}
