"""Models: their sources, their loading, and the rendering of their prompts."""
