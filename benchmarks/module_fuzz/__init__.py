"""Trains random modules beside eager: numbers, generators and measured peaks over three steps.

A program is a random module with random options and a random loop (`programs`), made of kinds of blocks
(`blocks`). `loops` runs it, `compare` tells how irc did, `shrink` drops what a fault does not need, and
`running` does that for many seeds in a process that may die.
"""
