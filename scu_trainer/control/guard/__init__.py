"""Watches over a run: is a step a spike, does the loss diverge?"""
