"""MileBench as lmms-eval tasks: one YAML file a sub-task, `utils` for what they call.

`subtasks` is the list of sub-tasks and groups, `reading` loads the released files, `prompt` makes the prompts and
`metrics` scores the answers.
"""
