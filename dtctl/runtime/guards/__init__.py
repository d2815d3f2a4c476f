"""What happens when a step cannot be used: gradients that are not finite, memory that runs out."""
