"""Prompt to answers: prefill once, fork many, decode, measure."""
