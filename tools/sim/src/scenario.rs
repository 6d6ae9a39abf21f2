//! Named simulations: the papers' tables and figures. Files below `scenarios/` have their
//! parameters, and what is shown of the results beside the paper's numbers.

mod blog;
mod decoding;
mod drives;
mod experiment;
mod hiding;
mod lmcache;
mod served;
mod swarm;
mod testbed;

use std::{
    collections::{BTreeMap, HashMap},
    sync::LazyLock,
};

use serde::Deserialize;
use serde_json::{Map, Value};

use crate::{
    outcome::{Gantt, Outcome, Plot, number},
    parallel::each,
    parameters::Parameters,
    shown::{Compared, Drawn, Listed, Numbers, Shown, Ticks, join},
};
use experiment::Experiment;
use testbed::Testbed;

/// The scenarios of each paper, in the order of `ripieno sim all`.
const PAPERS: [&str; 5] = [
    include_str!("../scenarios/tutti.toml"),
    include_str!("../scenarios/tierkv.toml"),
    include_str!("../scenarios/vllm.toml"),
    include_str!("../scenarios/lmcache.toml"),
    include_str!("../scenarios/swarm.toml"),
];

/// A file of scenarios.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Paper {
    /// Texts and formulas that others refer to as `{name}`.
    #[serde(default)]
    texts: BTreeMap<String, String>,
    /// Machines that runs name, and runs that others are `like`.
    #[serde(default)]
    machines: BTreeMap<String, Value>,
    scenario: Vec<Scenario>,
}

impl Paper {
    /// Returns the scenarios, which no longer need the file.
    fn scenarios(self) -> Vec<Scenario> {
        let Self { texts, machines, mut scenario } = self;
        let named = |name: &Value| {
            let known = name.as_str().and_then(|name| machines.get(name));
            known.unwrap_or_else(|| panic!("{name}: no such machine")).clone()
        };
        for scenario in &mut scenario {
            scenario.texts.clone_from(&texts);
            for Runs { set, .. } in &mut scenario.runs {
                if let Some(machine) = set.get_mut("machine") {
                    *machine = named(machine);
                }
                if let Some(Value::Object(mut like)) = set.remove("like").as_ref().map(named) {
                    like.append(set);
                    *set = like;
                }
            }
        }
        scenario
    }
}

/// A scenario.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Scenario {
    /// Name.
    pub name: String,
    /// Title.
    pub title: String,
    setting: Vec<String>,
    #[serde(default)]
    notes: Vec<String>,
    runs: Vec<Runs>,
    /// Numbers of the paper that tables show.
    #[serde(default)]
    given: BTreeMap<String, f64>,
    #[serde(default)]
    tables: Vec<Listed>,
    #[serde(default)]
    plots: Vec<Drawn>,
    #[serde(default)]
    comparisons: Vec<Compared>,
    #[serde(skip)]
    texts: BTreeMap<String, String>,
}

/// Runs of an experiment: one for each combination of the axes' values.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Runs {
    /// Begins the names of their results.
    name: Option<String>,
    /// Parameters of all of them, or formulas of them; `kind` names the experiment.
    set: Map<String, Value>,
    #[serde(default)]
    axes: Vec<Axis>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Axis {
    /// By which tables and plots refer to it.
    name: String,
    /// The parameter that it sets, such as `machine.drives`; the name, if there is none.
    field: Option<String>,
    /// Names of the values: `{}` stands for one.
    label: Option<String>,
    /// Values of the parameter; or tables of several parameters, with a `label`, and with an `x` if
    /// it is the axis of a plot.
    values: Vec<Value>,
}

/// A value of an axis.
#[derive(Debug)]
struct Tick {
    label: String,
    x: f64,
    set: Map<String, Value>,
}

impl Axis {
    fn ticks(&self) -> impl Iterator<Item = Tick> {
        self.values.iter().map(|value| {
            if let Value::Object(set) = value {
                let mut set = set.clone();
                let label = set.remove("label").and_then(|it| it.as_str().map(str::to_owned));
                let x = set.remove("x").and_then(|x| x.as_f64()).unwrap_or(f64::NAN);
                return Tick { label: label.expect("a tick has a label"), x, set };
            }
            let x = value.as_f64().unwrap_or(f64::NAN);
            let plain = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
            let label = match &self.label {
                Some(label) if value.is_f64() => label.replace("{}", &x.to_string()),
                Some(label) => label.replace("{}", &plain),
                None if value.is_f64() => number(x),
                None => plain,
            };
            let path = self.field.as_ref().unwrap_or(&self.name).rsplit('.');
            let set = path.fold(value.clone(), |value, name| {
                Value::Object(Map::from_iter([(name.to_owned(), value)]))
            });
            let Value::Object(set) = set else { unreachable!("a path has a name") };
            Tick { label, x, set }
        })
    }
}

/// Puts `more` into the parameters of a run; tables of both are merged.
fn merge(set: &mut Map<String, Value>, more: Map<String, Value>) {
    for (name, value) in more {
        match (set.get_mut(&name), value) {
            (Some(Value::Object(old)), Value::Object(new)) => merge(old, new),
            (_, value) => _ = set.insert(name, value),
        }
    }
}

impl Runs {
    /// Returns the parameters of each run, and the beginning of its results' names.
    fn all(&self) -> Vec<(String, Map<String, Value>)> {
        let mut all = vec![(self.name.clone().unwrap_or_default(), self.set.clone())];
        for axis in &self.axes {
            let ticks: Vec<Tick> = axis.ticks().collect();
            let with = |(name, set): &(String, Map<String, Value>), tick: &Tick| {
                let mut set = set.clone();
                merge(&mut set, tick.set.clone());
                (join(name, &tick.label), set)
            };
            all = all.iter().flat_map(|run| ticks.iter().map(|tick| with(run, tick))).collect();
        }
        all
    }
}

impl Scenario {
    /// Returns all scenarios.
    /// Panics if a file is wrong, which a test would have found.
    pub fn all() -> &'static [Self] {
        static ALL: LazyLock<Vec<Scenario>> = LazyLock::new(|| {
            let of = |text: &&str| {
                let paper = basic_toml::from_str::<Paper>(text);
                paper.unwrap_or_else(|error| panic!("{error}: {text}")).scenarios()
            };
            PAPERS.iter().flat_map(of).collect()
        });
        &ALL
    }

    /// Returns the scenario of this name.
    pub fn named(name: &str) -> Option<&'static Self> {
        Self::all().iter().find(|scenario| scenario.name == name)
    }

    /// Runs the simulation.
    pub fn run(&self, parameters: &Parameters) -> Outcome {
        let ticks = &self.ticks();
        let found = &self.found(parameters, ticks);
        let shown = Shown { found, parameters, texts: &self.texts, ticks };
        let texts = |all: &[String]| all.iter().map(|text| shown.text(text)).collect();
        let mut setting: Vec<String> = texts(&self.setting);
        setting.extend(parameters.replaced());
        let (plots, gantts) = self.over_time(parameters);
        Outcome {
            name: self.name.clone(),
            title: self.title.clone(),
            setting,
            tables: self.tables.iter().flat_map(|it| it.tables(&shown)).collect(),
            comparisons: Compared::all(&self.comparisons, &shown),
            plots: self.plots.iter().flat_map(|it| it.plots(&shown)).chain(plots).collect(),
            gantts,
            notes: texts(&self.notes),
        }
    }

    /// Returns the pictures that are not of numbers, but of a run.
    fn over_time(&self, parameters: &Parameters) -> (Vec<Plot>, Vec<Gantt>) {
        let setup = || {
            let machine = Testbed::deserialize(self.runs[0].set["machine"].clone());
            machine.expect("its runs have it").setup(parameters)
        };
        match self.name.as_str() {
            "tutti-8" => (served::busy_plots(&setup()), Vec::new()),
            "hiding" => (Vec::new(), hiding::gantts(&setup())),
            _ => Default::default(),
        }
    }

    /// Returns the results of all runs. Equal ones of the same experiment are run once.
    fn found(&self, parameters: &Parameters, ticks: &Ticks<'_>) -> Numbers {
        let mut found = self.given.clone();
        for runs in &self.runs {
            let mut all = runs.all();
            let shown = Shown { found: &found, parameters, texts: &self.texts, ticks };
            all.iter_mut().for_each(|(_, set)| shown.calculate(set));
            let mut distinct: Vec<&Map<String, Value>> = Vec::new();
            let mut numbers = HashMap::new();
            let of = all.iter().map(|(_, set)| {
                *numbers.entry(Value::Object(set.clone()).to_string()).or_insert_with(|| {
                    distinct.push(set);
                    distinct.len() - 1
                })
            });
            let of: Vec<usize> = of.collect();
            let results = each(&distinct, |set| {
                let experiment = Experiment::deserialize(Value::Object((*set).clone()));
                experiment.unwrap_or_else(|it| panic!("{}: {it}", self.name)).run(parameters)
            });
            for ((run, _), at) in all.iter().zip(of) {
                let named = results[at].iter().map(|(name, value)| (join(run, name), *value));
                found.extend(named);
            }
        }
        found
    }

    /// Returns the labels of each axis, with their places in a plot.
    fn ticks(&self) -> Ticks<'_> {
        let axes = self.runs.iter().flat_map(|runs| &runs.axes);
        let of = |axis: &Axis| axis.ticks().map(|tick| (tick.label, tick.x)).collect();
        axes.map(|axis| (axis.name.as_str(), of(axis))).collect()
    }
}

#[cfg(test)]
mod tests;
