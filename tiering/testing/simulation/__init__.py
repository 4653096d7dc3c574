"""A simulation of the product, in virtual time and from a seed: the real core, with all around it simulated.

``python -m tiering.testing.simulation --seed N --steps M`` runs one seed; the same seed always does the same.
"""

from tiering.testing.simulation.agenda import SimulationFailure
from tiering.testing.simulation.injection import Injector
from tiering.testing.simulation.medium import Medium, Stored
from tiering.testing.simulation.run import Result, Simulation, simulate
from tiering.testing.simulation.scenario import Scenario, scenario

__all__ = [
    "Injector",
    "Medium",
    "Result",
    "Scenario",
    "Simulation",
    "SimulationFailure",
    "Stored",
    "scenario",
    "simulate",
]
