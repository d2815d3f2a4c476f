"""Manifests for Kubernetes; pod, job and completion have its meaning."""
