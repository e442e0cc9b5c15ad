"""Which layers a run has and where they are: built, divided among stages, moved, told from a Hugging Face model."""
