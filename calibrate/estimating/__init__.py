"""Estimates a job's profile from data sheets, without a GPU (docs/how-it-works/estimates.md)."""
