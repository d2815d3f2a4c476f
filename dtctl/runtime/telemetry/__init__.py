"""What a training measures and tells: metrics, progress, profiles, the last collectives."""
