"""Models: where they come from, how they are loaded, and how their prompts are rendered."""
