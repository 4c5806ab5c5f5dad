# SPDX-License-Identifier: Apache-2.0
"""The draft's experts: the right MoE method for packed fp4 (choice.py), and a watch over the draft's numbers (guard.py)."""
