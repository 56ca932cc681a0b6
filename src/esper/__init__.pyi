"""The public names of Esper, by heading of the reference: the one table that Python, type checkers and the reference read."""

# Grow, train and compare
from esper.api import grow as grow
from esper.api import train as train
from esper.api import resume as resume
from esper.api import evaluate as evaluate
from esper.api import show as show
from esper.karn.reader import open_run as open_run
from esper.karn.report.page import write_report

report = write_report
from esper.karn.report.page import draw_report as draw_report
from esper.karn.comparison import compare as compare

# Grow in your own training loop
from esper.runs.live.growth import Growth as Growth
from esper.runs.live.anytime import AnytimeGrowth as AnytimeGrowth
from esper.tolaria.live.resize import widen as widen
from esper.tolaria.live.resize import deepen as deepen
from esper.runs.estimators import GrowingClassifier as GrowingClassifier
from esper.runs.estimators import GrowingRegressor as GrowingRegressor
from esper.runs.healing.heal import heal as heal
from esper.runs.healing.healed import Healed as Healed
from esper.runs.lora import lora_ranks as lora_ranks
from esper.kasmina.graft.grafted import graft as graft
from esper.kasmina.graft.grafted import ungraft as ungraft
from esper.kasmina.network.saving import attach as attach
from esper.kasmina.network.saving import load_grown as load_grown

# Grown networks
from esper.api import load as load
from esper.kasmina.network.grown_network import GrownNetwork as GrownNetwork
from esper.kasmina.network.drawing import draw as draw
from esper.leyline.data.task import Interface as Interface

# Tasks and data
from esper.tasks.own.custom import task_from

task = task_from
from esper.tasks.catalog import get_task as get_task
from esper.leyline.data.task import Task as Task
from esper.leyline.data.task import Mixture as Mixture
from esper.leyline.data.task import Instance as Instance
from esper.leyline.data.task import Split as Split
from esper.leyline.data.task import Objective as Objective
from esper.leyline.data.task import Pixels as Pixels
from esper.leyline.data.task import Scaling as Scaling
from esper.leyline.data.task import Room as Room
from esper.leyline.data.task import Lengths as Lengths

# Hosts and blueprints
from esper.tasks.hosts import mlp as mlp
from esper.tasks.hosts import cnn as cnn
from esper.tasks.hosts import GRU, Transformer

transformer = Transformer
gru = GRU
from esper.kasmina.host import SegmentedHost as SegmentedHost
from esper.leyline.lifecycle.slots import SlotSpec as SlotSpec
from esper.leyline.lifecycle.slots import Kind as Kind
from esper.leyline.lifecycle.slots import Site as Site
from esper.leyline.lifecycle.slots import Stream as Stream
from esper.leyline.lifecycle.slots import Vector as Vector
from esper.leyline.lifecycle.slots import Volume as Volume
from esper.leyline.lifecycle.slots import Map as Map
from esper.leyline.lifecycle.slots import Sequence as Sequence
from esper.kasmina.graft.find_sites import find_sites as find_sites
from esper.kasmina.graft.find_sites import FoundSites as FoundSites
from esper.leyline.lifecycle.slots import Tap as Tap
from esper.kasmina.stack.layers import Linear as Linear
from esper.kasmina.blueprints import blueprint as blueprint
from esper.api import check_rows as check_rows

# Configuration
from esper.leyline.config.tree import build_config as build_config
from esper.leyline.config.tree import Config as Config
from esper.leyline.config.tree import RewardConfig as RewardConfig

# Controllers and the engine
from esper.leyline.protocols import Controller as Controller
from esper.tamiyo.catalog import get_controller as get_controller
from esper.tamiyo.catalog import ControllerSpec as ControllerSpec
from esper.tolaria.engine import VectorizedEngine as VectorizedEngine

# What a controller decides
from esper.leyline.lifecycle.vocabulary import Actions as Actions
from esper.leyline.lifecycle.vocabulary import Head as Head
from esper.leyline.lifecycle.vocabulary import Op as Op
from esper.leyline.lifecycle.vocabulary import Blend as Blend

# What a controller sees
from esper.leyline.lifecycle.view import View as View
from esper.leyline.lifecycle.view import Space as Space
from esper.leyline.lifecycle.view import BlueprintInfo as BlueprintInfo
from esper.leyline.lifecycle.view import Seeds as Seeds
from esper.leyline.lifecycle.vocabulary import Stage as Stage
from esper.leyline.lifecycle.view import Masks as Masks
from esper.leyline.lifecycle.view import Measurements as Measurements
from esper.leyline.lifecycle.view import Estimate as Estimate
from esper.leyline.lifecycle.view import CoalitionValues as CoalitionValues
from esper.leyline.lifecycle.view import ComputeShares as ComputeShares

# What came of a decision
from esper.leyline.lifecycle.view import Outcome as Outcome
from esper.leyline.lifecycle.view import Scores as Scores
from esper.leyline.lifecycle.vocabulary import Refusal as Refusal
from esper.leyline.lifecycle.vocabulary import Vital as Vital
from esper.leyline.protocols import Reward as Reward

# Errors
from esper.leyline.messages import InputError as InputError
from esper.leyline.messages import DataFault as DataFault
from esper.leyline.messages import LearningError as LearningError
from esper.leyline.messages import OutOfMemory as OutOfMemory
from esper.leyline.messages import UserCodeError as UserCodeError

__version__: str
