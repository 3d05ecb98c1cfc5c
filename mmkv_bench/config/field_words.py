"""Words of the field for what this package calls otherwise, as data: of lm-eval, lmms-eval, kvpress, vLLM, transformers, Slurm.

`KEYS`, `VALUES` and `NAMES` are exact synonyms, which are accepted. `ANSWERS`, `NAME_ANSWERS` and `VERBS` are words whose meaning
depends on more than the word: each is refused with the words to type. Keys are in lower case with `_` for `-`, names folded.

In an answer stands between backticks what can be typed, settings for the word's place or a command. `{value}` is the value as
given, `{kept}` it as a share (`10%`) and `{rest}` what a share leaves, `{digits}` its digits, `{minutes}` it as a time of Slurm,
and `{words}` what follows a verb, after a space.
"""

from __future__ import annotations


def _by_word(*entries: tuple[str, str]) -> dict[str, str]:
    return {word: text for words, text in entries for word in words.split()}


KEYS = _by_word(
    ("datasets task tasks task_name benchmark benchmarks dataset_name data_name", "dataset"),
    ("methods method_name compressor algorithm press press_name", "method"),
    ("models model_name model_id model_name_or_path pretrained checkpoint", "model"),
    ("config config_name recipe preset", "experiment"),
    (
        "budgets kv_budget kv_budgets cache_budget token_budget kv_cache_budget kv_size kv_cache_size cache_size",
        "budget",
    ),
    ("cache_len max_cache_len max_capacity_prompt max_capacity_prompts max_kv_size", "budget"),
    ("seeds random_seed rng_seed manual_seed", "seed"),
    ("num_samples max_samples n_samples nsamples num_examples max_examples n_examples sample_size n_limit", "limit"),
    ("out_dir output_dir output output_path output_folder out_path save_dir save_path results_dir result_dir o", "out"),
    ("dtype torch_dtype precision model.torch_dtype", "model.dtype"),
    ("device", "model.device"),
    ("device_map", "model.device_map"),
    ("attn_implementation attn attn_impl attention model.attn_implementation", "model.attention"),
    ("weights", "model.weights"),
    ("report_to tracker", "logger"),
    ("wandb.project wandb_project project logger.wandb_project", "logger.project"),
    ("wandb.entity wandb_entity entity wandb.team", "logger.entity"),
    ("wandb.name wandb_name wandb.run_name run_name", "logger.name"),
    ("wandb.mode wandb_mode", "logger.mode"),
    ("hydra/launcher", "launcher"),
    ("window_size method.window_size observation_window obs_window", "method.window"),
    ("kernel_size method.kernel_size", "method.pool"),
    ("num_repeats n_repeats num_runs iterations num_iterations", "repeats"),
    ("partition slurm.partition slurm_partition queue", "hydra.launcher.partition"),
    ("account slurm.account slurm_account", "hydra.launcher.account"),
    ("qos slurm.qos", "hydra.launcher.qos"),
    ("constraint slurm.constraint", "hydra.launcher.constraint"),
    ("gres slurm.gres", "hydra.launcher.gres"),
    ("nodes slurm.nodes num_nodes", "hydra.launcher.nodes"),
    ("gpus num_gpus n_gpus ngpus gpus_per_node", "hydra.launcher.gpus_per_node"),
    ("slurm.gpus slurm.gpus_per_node hydra.launcher.gpus", "hydra.launcher.gpus_per_node"),
    ("cpus cpus_per_task slurm.cpus slurm.cpus_per_task hydra.launcher.cpus", "hydra.launcher.cpus_per_task"),
    ("mem_gb slurm.mem_gb", "hydra.launcher.mem_gb"),
    ("timeout_min slurm.timeout_min", "hydra.launcher.timeout_min"),
)
"""Word -> the key that it is."""

VALUES = {
    "model.dtype": _by_word(
        ("fp16 half f16 torch.float16", "float16"),
        ("bf16 torch.bfloat16", "bfloat16"),
        ("fp32 float f32 torch.float32", "float32"),
    ),
    "model.device": {"gpu": "cuda"},
    "model.attention": _by_word(("flash_attn flash_attention fa2 flash", "flash_attention_2")),
    "scenario": _by_word(
        ("throughput latency speed performance timing", "efficiency"), ("accuracy eval evaluation", "quality")
    ),
    "launcher": _by_word(("submitit_slurm submitit sbatch", "slurm"), ("basic", "local")),
}
"""Key -> value -> what it is there."""

NAMES = {
    "method": _by_word(
        ("fullkv fullcache fullkvcache fullattention nocompression uncompressed", "full"),
        ("mmshiftkv", "mmshift"),
        ("attentionsink attentionsinks", "streamingllm"),
        ("adasnapkv", "adakv"),
        ("heavyhitteroracle heavyhitter", "h2o"),
    ),
    "dataset": {"infographicvqa": "infovqa", "vstarbench": "vstar"},
    "model": _by_word(("llama38b llama38binstruct", "llama_3_8b")),
}
"""Group -> folded name -> the name that it is."""

NAME_ANSWERS = {
    "method": _by_word(
        ("all *", "a run takes the methods that it names; on the embedded model `experiment=methods` has all of them"),
        (
            "tova tovapress",
            "scores of the library kvpress are run by `method=kvpress kvpress.press=TOVAPress`",
        ),
        (
            "fastv sparsevlm pyramiddrop visionzip",
            "it drops visual tokens of the prompt, and the methods here drop entries of the cache; `mmkv-bench run --help` lists "
            "them",
        ),
        ("kivi2bit kivi2", "bits are a parameter: write `method=kivi kivi.bits=2`"),
        (
            "none no null baseline original dense",
            "the cache without compression is `method=full`, and it runs beside every other method, too",
        ),
    ),
    "dataset": _by_word(
        ("all * list help", "`mmkv-bench data list` lists the datasets; all of a benchmark are `dataset=milebench`"),
    ),
    "model": _by_word(
        ("all *", "a run takes one model; `mmkv-bench run --help` lists them"),
        ("llavanext llavanext7b", "write `model=llava_v1_6_mistral_7b` or `model=llava_v1_6_vicuna_7b`"),
    ),
}
"""Group -> name -> answer."""

_LEAVE = "; leave it out"
ANSWERS = _by_word(
    (
        "ratio ratios sparsity_ratio kv_ratio cache_ratio",
        "it says neither what stays nor what goes: `budget={kept}` keeps {kept} of the entries, `budget={rest}` takes {kept} "
        "away; write one of them",
    ),
    (
        "compression_ratio compression_ratios pruning_ratio prune_ratio eviction_ratio evict_ratio drop_ratio sparsity "
        "compression",
        "it counts what goes, and a budget what stays: write `budget={rest}`",
    ),
    (
        "keep_ratio kept_ratio retention_ratio retain_ratio retention keep_rate kv_keep_ratio cache_keep_ratio",
        "a budget counts what stays: write `budget={kept}`",
    ),
    (
        "heavy_ratio hh_ratio heavy_hitter_ratio hh_size heavy_size recent_ratio recent_size",
        "a budget counts all entries that stay, recent and heavy: write it as `budget=20%`, or as `budget=64` per KV head",
    ),
    (
        "batch_size bs batchsize per_device_batch_size per_device_eval_batch_size",
        "sequences at a time are `scenario=efficiency batch={value}`; answers to a dataset are decoded together up to "
        "`fork_batch={value}`; write one of them",
    ),
    (
        "max_new_tokens max_tokens max_gen_toks max_gen_tokens gen_kwargs generation.max_new_tokens",
        "tokens of an answer are `dataset.generation.max_new_tokens={digits}`, of timed passes `scenario=efficiency "
        "new_tokens={digits}`; write one of them",
    ),
    (
        "context context_length context_len max_model_len max_length max_len max_seq_len seq_len seqlen sequence_length length "
        "prompt_length prompt_len input_len input_length max_position_embeddings",
        "lengths of made prompts are `scenario=efficiency lengths=[{digits}]`; the longest prompt that is answered "
        "is `model.max_prompt_tokens={digits}`; write one of them",
    ),
    (
        "do_sample temperature top_p top_k num_beams n_beams beam_size repetition_penalty",
        "answers are decoded greedily, so that methods can be compared token for token" + _LEAVE,
    ),
    ("num_fewshot fewshot n_shot num_shots shots", "prompts hold no examples" + _LEAVE),
    ("apply_chat_template chat_template", "every prompt has the model's chat template" + _LEAVE),
    (
        "log_samples save_outputs save_predictions save_answers",
        "rows always hold every answer, and `mmkv-bench show <rows>` shows them" + _LEAVE,
    ),
    (
        "resume overwrite force continue rerun restart",
        "a run goes on by itself from the rows in its folder: leave it out and write the run's command again, or begin anew with "
        "`out=runs/new`",
    ),
    ("verbose debug verbosity log_level quiet", "nothing more or less can be said" + _LEAVE),
    ("trust_remote_code", "remote code is never run" + _LEAVE),
    (
        "cache_dir hf_home hf_cache",
        "the hub's cache is where HF_HOME says: begin the command with HF_HOME={value}; a folder of data is `data.root={value}`",
    ),
    (
        "data_dir data_path data_root dataset_root dataset_dir",
        "a folder with one for each dataset is `data.root={value}`; write that",
    ),
    (
        "tensor_parallel_size tensor_parallel tp tp_size parallelize",
        "a model larger than one device is divided by layers: write `model.device_map=auto`",
    ),
    (
        "gpu_memory_utilization",
        "passes hold at most `scenario=efficiency memory_limit=8GiB`; write that, or leave it out",
    ),
    (
        "quantization quantize quant nbits n_bits bits kv_bits quant_bits kv_cache_dtype",
        "the cache is quantised by `method=kivi kivi.bits={digits}`, weights are not; write that, or leave it out",
    ),
    ("load_in_4bit load_in_8bit", "weights run in float32, bfloat16 or float16: write `model.dtype=bfloat16`"),
    ("wandb use_wandb", "write `logger=wandb`"),
    (
        "time walltime time_limit slurm_time slurm.time hydra.launcher.time",
        "write `hydra.launcher.timeout_min={minutes}`",
    ),
    ("mem slurm.mem hydra.launcher.mem", "write `hydra.launcher.mem_gb={digits}`"),
    (
        "array_index array_id shard_id num_shards n_shards shard_index world_size",
        "a process takes one part of each dataset, counted from 0: the first of eight is `shard=0/8`, and `mmkv-bench sweep "
        "launcher=slurm shards=8` writes an array of eight itself; write your own numbers there",
    ),
    (
        "model_args",
        "each argument is a setting of its own: `model=hf model.path=org/name model.dtype=bfloat16`; write those, with a folder "
        "or hub id of yours",
    ),
    (
        "gpu",
        "a run computes on the GPU that CUDA_VISIBLE_DEVICES names, `model.device=cuda` insists on one, and `mmkv-bench plan "
        "--device a100` forecasts one that is not here",
    ),
    (
        "fraction sample_fraction data_fraction subset_fraction",
        "a part of a dataset is a number of samples: the first twenty are `limit=20`; write such a number",
    ),
    ("split dataset_split", "write `dataset.split={value}`"),
    ("subset", "the first samples are `limit={value}`, and a part of a benchmark is a dataset; write that"),
    ("hydra.run.dir", "the folder of a run's rows is `out={value}`; write that"),
    ("judge_model", "write `judge=openai judge.model={value}`"),
    (
        "metric metrics",
        "a dataset brings its metrics" + _LEAVE + ", and choose with `mmkv-bench tables <rows> --metric {value}`",
    ),
)
"""Key -> answer."""

VERBS = _by_word(
    ("eval evaluate bench benchmark test answer generate start", "write `mmkv-bench run{words}`"),
    (
        "list ls models methods experiments list-tasks list-models list-methods",
        "`mmkv-bench run --help` lists models, datasets, methods and experiments",
    ),
    ("datasets tasks benchmarks list-datasets", "write `mmkv-bench data list`"),
    ("help", "write `mmkv-bench --help`, or for what a run takes `mmkv-bench run --help`"),
    ("version", "write `mmkv-bench --version`"),
    (
        "latency throughput speed memory estimate-memory estimate-latency efficiency",
        "write `mmkv-bench plan scenario=efficiency{words}` for a forecast; `mmkv-bench run scenario=efficiency` measures",
    ),
    ("info env doctor dry-run dryrun estimate", "write `mmkv-bench plan{words}`"),
    (
        "download prepare pull",
        "a run downloads what it lacks; write `mmkv-bench data check{words}` to see what that is",
    ),
    (
        "compare diff",
        "methods stand beside one another in the table of a run (`mmkv-bench run method=[snapkv,keydiff] budget=64`), those of "
        "stored rows in `mmkv-bench tables <rows> --pairs`, and several folders in `mmkv-bench report <rows> --out <folder>`",
    ),
    (
        "leaderboard results table summary",
        "`mmkv-bench tables <rows>` prints scores, `mmkv-bench report <rows> --out <folder>` makes pages",
    ),
    (
        "serve server deploy",
        "this package measures and serves nothing; write `mmkv-bench plan scenario=efficiency{words}`",
    ),
    (
        "config config-file config-path configure",
        "settings in a file are an experiment: write `mmkv-bench run experiment=demo`; --config-dir adds a folder of yours",
    ),
    ("submit slurm sbatch", "write `mmkv-bench sweep launcher=slurm{words}`"),
    ("figure figures draw", "write `mmkv-bench plot budget <rows> --out <file>`"),
    (
        "reproduce rerun replicate redo repeat",
        "`mmkv-bench verify <rows> 4141fc34` makes the answers of a cell of these rows again and compares them, and "
        "`mmkv-bench show <rows> 4141fc34` prints its command; name your cell there",
    ),
    ("view browse visualize", "write `mmkv-bench report <rows> --out <folder>`"),
)
"""First word, or a flag without its dashes -> answer."""

FLAGS = _by_word(
    ("csv", "write `--format csv`"),
    ("latex tex", "write `--format latex`"),
    ("markdown md", "markdown is how it prints; leave it out"),
    (
        "alpha significance level confidence",
        "the level is .05 and cannot be set, so that tables can be compared; leave it out",
    ),
)
"""Flag of verbs that read rows, without its dashes -> answer."""
