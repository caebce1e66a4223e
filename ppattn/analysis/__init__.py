"""Analyses of trained models: attention maps, measures computed from them, interventions."""
