"""What users write that no run can do, each one word of a command line. `<method>` stands for a method of the run."""

_SYNTAX = (
    "budget",
    "=3",
    "budget=[1",
    "budget={",
    "a b=1",
    "--wat",
    "-x",
    "budget=1,2",
    "seed=range(3)",
    "budget==",
    "ü=1",
)

_KEYS = (
    "sede=1", "+sede=1", "++sede=1", "~seed", "+seed=1", "methods.<method>.nosuch=1", "+methods.<method>.nosuch=1",
    "methods.nosuch.x=1", "methods.custom.path=x", "methods.<method>.reading=x", "model.nme=x", "datasets.nosuch.count=1",
    "dataset.nosuch=1", "seed.deep=1", "model.deep.er=1", "methods=3", "datasets={}", "hydra.run.dir=x", "model={name: x}",
    "methods.<method>.about.idea.x=1", "judge.nosuch=1", "folders=[x]", "folders=3",
)  # fmt: skip

_VARIANTS = (
    "variants=3", "variants.a=3", "variants.a={}", "variants.a={base: nosuch}", "variants.a={base: full}",
    "variants.<method>={base: mmshift}", "variants.a={base: snapkv, nosuch: 1}", "variants.a={base: snapkv, window: x}",
    "variants.a={base: snapkv, window: -1}", "variants.a={base: snapkv, pooling: median}", "variants.a={base: [snapkv]}",
    "variants.a={base: snapkv, reading: x}", "variants.a={base: custom}", "variants.a={base: null}", "variants.a.b.c=1",
    "variants.a={base: adakv, alpha: 7}", "variants.a={base: snapkv, decoding: 3}",
    "variants.a={base: snapkv, decoding: {_target_: os.system}}", "variants.a={base: snapkv, scorer: null}",
)  # fmt: skip

_GROUPS = (
    "method=nosuch", "method=[<method>,<method>]", "method=[]", "method=null", "method=3", "dataset=[]", "dataset=nosuch",
    "model=[tiny,tiny]", "model=nosuch", "+model=tiny", "~model", "experiment=nosuch", "experiment=[demo]",
    "method=[[snapkv]]", "dataset={pages: 1}", "data=nosuch", "judge=nosuch", "logger=nosuch", "launcher=nosuch",
    "method=custom", "model.revision=abc", "dataset.generation=3",
)  # fmt: skip

_VALUES = {
    "budget": "0 -1 1.5 abc nan inf -inf 120% 0% null true [] [64,0] {a:1} 1e-400 '' [[1]] 0x10 1e400 [null] ' ' % 1/2 "
    "99999999999999999999",
    "seed": "-1 1.5 a null true [] [0,a] {} [[0]] inf 99999999999999999999",
    "protocol": "strct null [] 7 [paper,x] {}",
    "reading": "relesed null [] 1",
    "limit": "0 -3 a 1.5 true [1] inf 99999999999999999999",
    "shard": "2/2 1/0 -1/2 a 1 null",
    "fork_batch": "0 a null -1 1.5",
    "fork_memory": "0 3XB -1 abc [] {} nan",
    "timeout_s": "0 -1 a nan true []",
    "page_size": "huge null [small]",
    "stage": "x null",
    "baseline": "x snapkv",
    "sharing": "maybe null",
    "fidelity": "7",
    "retry": "ok [5] {}",
    "json": "maybe 7 null",
    "out": "'' null /dev/null /dev/null/x [x]",
    "logger.kind": "x",
    "logger.mode": "x",
    "judge.kind": "x null",
    "judge.timeout_s": "-1 a null",
    "judge.retries": "-1 1.5",
    "gate.expected": "a [] true",
    "gate.tolerance": "a -1 nan",
    "model.dtype": "int8 null",
    "model.device": "tpu null",
    "model.attention": "flash_attention_3 x null",
    "model.min_pixels": "0 a",
    "model.max_prompt_tokens": "0 a -5",
    "model.threads": "0 a -1",
    "scenario": "speed null [] 3",
    "lengths": "0 8 a null [] [2048,x] {} 1e3",
    "batch": "0 a null [] [1,x] {} 1.5",
    "batch_prefill": "x null []",
    "memory_limit": "a -1 [] 0 3XiB",
    "new_tokens": "0 2 a null [] 1.5",
    "repeats": "0 -1 a null []",
    "order_seed": "-1 a null []",
    "model.frames": "0",
    "model.path": "/no/such/folder null /dev/null not-an-id pkg://nosuch/x",
    "model.weights": "/no/such/folder null",
    "dataset.count": "a -1 0 []",
    "dataset.generation.max_new_tokens": "0 a -1 null 1.5",
    "dataset.metrics": "[nosuch] 3",
    "dataset.measures": "[nosuch] 3",
    "dataset.task": "nosuch null",
    "dataset.split": "nosuch null",
}

_INTERPOLATIONS = {
    "out": "${oc.env:NO_SUCH_VARIABLE} ${x} ${out} ${oc.env:} ???",
    "budget": "${x} ${budget} ??? [${x}]",
    "seed": "${.y} ???",
    "limit": "${nosuch.deep} ???",
    "model.path": "${oc.env:NO_SUCH_VARIABLE}",
    "methods.<method>.nosuch": "${x}",
    "page_size": "${x}",
    "shard": "${nosuch:1}",
    "variants.a": "{base:snapkv,window:'${x}'}",
    "judge.url": "${oc.env:NO_SUCH_VARIABLE}",
    "gate.expected": "${x}",
    "dataset.count": "${x}",
    "fork_memory": "${x}",
    "logger.project": "${oc.env:NO_SUCH_VARIABLE}",
    "model": "${x}",
    "method": "${x}",
}


def _written(values: dict[str, str]) -> tuple[str, ...]:
    quoted = {key: text.replace("' '", "'\0'").split(" ") for key, text in values.items()}
    return tuple(f"{key}={word}".replace("\0", " ") for key, words in quoted.items() for word in words)


MISTAKES = (_SYNTAX, _KEYS, _VARIANTS, _GROUPS, _written(_VALUES), _written(_VALUES), _written(_INTERPOLATIONS))
"""By what is wrong; a kind is drawn first, values twice as often as the others."""
