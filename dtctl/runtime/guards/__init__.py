"""Guards against silent damage: gradients that are not finite, memory that runs out, unlike workers."""
