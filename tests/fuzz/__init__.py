"""Bad input for the real command: what a stranger's files, flags, folders and models may hold.

``cases``: a kind and a seed -> the words of a command, its files in a folder of their own. ``verdict``: the command
in a fork of this process, or as a program of its own, and what came of it.
"""
