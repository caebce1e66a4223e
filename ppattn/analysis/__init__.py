"""Analyses of trained models: their attention maps, measures of these, interventions."""
