"""The bridge to lmms-eval: its loop asks, this package answers and stores, and its metric code scores stored answers.

Only `lmms_eval_loop.py` imports lmms-eval, and only when a function needs it, so importing this package is quick.
"""
