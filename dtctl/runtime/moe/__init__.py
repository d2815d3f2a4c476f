"""Mixtures of experts: layers that send each token through a few of many feed-forward networks.

layer.py      an own plain layer: router, experts, shared experts, capacity, balance
accounting.py what a pass counts for: weights of auxiliary losses, and how many tokens experts were sent
dispatch.py   tokens sorted by expert, sent to the workers that have the experts, and back
recognize.py  which modules are experts, whoever wrote them
divide.py     experts divided over workers (mesh axis ep)
balance.py    after a step: what the experts got, for metrics and for balancing without a loss
"""
