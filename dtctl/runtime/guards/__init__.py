"""What would spoil a training without a word: gradients that are not finite, memory that runs out, unlike workers."""
