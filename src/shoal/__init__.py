"""Serve large language models on one machine or many."""
