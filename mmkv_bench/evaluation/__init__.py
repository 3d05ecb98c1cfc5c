"""The bridge to lmms-eval: its loop asks, we answer and store; its metric code scores what is stored.

Only `lmms_eval_loop.py` imports lmms-eval, and only when a function needs it: importing this package is quick.
"""
