"""MileBench as lmms-eval tasks: one YAML file per sub-task; the YAML files call functions of `utils`.

`subtasks` is the list of sub-tasks and groups, `reading` loads the released files, `prompt` makes the prompts and
`metrics` scores the answers.
"""
