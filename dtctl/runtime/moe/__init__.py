"""Mixtures of experts: layers that send each token through a few of many feed-forward networks.

layer.py      a plain layer of our own: router, experts, shared experts, capacity, balance
accounting.py weights of auxiliary losses in a pass, and numbers of tokens that experts were sent
dispatch.py   tokens sorted by expert, sent to the workers that have the experts, and back
recognize.py  recognition of the modules that are experts, in models of any library
divide.py     experts divided over workers (mesh axis ep)
balance.py    use of the experts in a step, for metrics and for balancing without a loss
"""
