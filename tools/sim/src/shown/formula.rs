//! Formulas of such files: arithmetic of numbers that have names.
//!
//! `= (1 - [ours|TTFT] / [{each}|TTFT]) * 100`: names are in brackets, labels of them in braces.
//! Arguments are separated by semicolons. `least(row: hit rate; [{row}|bubble])` is the least
//! value over the labels of an axis, or of a list: `least(row: 16K, 32K; [{row}|bubble])`.

use libm::{exp2, floor, log as ln};

use super::{Shown, numbers::Items};

/// A formula while it is computed.
struct Formula<'a> {
    shown: &'a Shown<'a>,
    whole: &'a str,
    rest: &'a str,
    /// Names in braces and their values.
    labels: Vec<(&'a str, &'a str)>,
}

impl Shown<'_> {
    /// Returns the value of a formula, which begins with `=`, or the number of this name.
    /// Panics if the text is wrong, which a test would have found.
    pub(super) fn figure(&self, text: &str, labels: &[(&str, &str)]) -> f64 {
        let Some(formula) = text.strip_prefix('=') else { return self.number(text, labels) };
        let whole = &self.expanded(formula);
        let mut formula = Formula { shown: self, whole, rest: whole, labels: labels.to_vec() };
        let value = formula.sum();
        assert!(formula.rest.trim().is_empty(), "{whole}: {} is left", formula.rest);
        value
    }
}

impl<'a> Formula<'a> {
    /// Skips a sign, if it is the next one.
    fn takes(&mut self, sign: char) -> bool {
        let rest = self.rest.trim_start().strip_prefix(sign);
        rest.inspect(|rest| self.rest = rest).is_some()
    }

    /// Returns the text up to a sign.
    fn until(&mut self, sign: char) -> &'a str {
        let (text, rest) = self.rest.split_once(sign).unwrap_or_else(|| self.wrong(sign));
        self.rest = rest;
        text.trim()
    }

    fn wrong(&self, wanted: char) -> ! {
        panic!("{}: no {wanted} where {:?} is left", self.whole, self.rest)
    }

    fn sum(&mut self) -> f64 {
        let mut value = self.product();
        loop {
            if self.takes('+') {
                value += self.product();
            } else if self.takes('-') {
                value -= self.product();
            } else {
                return value;
            }
        }
    }

    fn product(&mut self) -> f64 {
        let mut value = self.part();
        loop {
            if self.takes('*') {
                value *= self.part();
            } else if self.takes('/') {
                value /= self.part();
            } else {
                return value;
            }
        }
    }

    fn part(&mut self) -> f64 {
        if self.takes('[') {
            let name = self.until(']');
            return self.shown.number(name, &self.labels);
        }
        if self.takes('(') {
            return self.last();
        }
        let text = self.rest.trim_start();
        let end = text.find(|it: char| !it.is_alphanumeric() && it != '.').unwrap_or(text.len());
        let word;
        (word, self.rest) = text.split_at(end);
        word.parse().unwrap_or_else(|_| self.function(word))
    }

    /// Returns the value of what is left in parentheses.
    fn last(&mut self) -> f64 {
        let value = self.sum();
        if self.takes(')') { value } else { self.wrong(')') }
    }

    fn function(&mut self, name: &str) -> f64 {
        if !self.takes('(') {
            self.wrong('(');
        }
        match name {
            "floor" => return floor(self.last()),
            "ln" => return ln(self.last()),
            "min" | "max" => {
                let one = self.sum();
                self.until(';');
                let other = self.last();
                return if name == "min" { one.min(other) } else { one.max(other) };
            }
            _ => {}
        }
        let all = self.over();
        let values = || all.iter().map(|(_, value)| *value);
        match name {
            "least" => values().fold(f64::INFINITY, f64::min),
            "most" => values().fold(f64::NEG_INFINITY, f64::max),
            "mean" => values().sum::<f64>() / all.len() as f64,
            "count" => values().filter(|value| *value > 0.0).count() as f64,
            "best" => all.iter().max_by(|one, other| one.1.total_cmp(&other.1)).expect("labels").0,
            "crossing" => crossing(&all),
            "doubling" => doubling(&all),
            _ => panic!("{}: {name}: no such function", self.whole),
        }
    }

    /// Returns the values of what is left in parentheses for each label, with their places.
    fn over(&mut self) -> Vec<(f64, f64)> {
        let (name, items) = (self.until(':'), self.until(';'));
        let items = match self.shown.ticks.contains_key(items) {
            true => Items::Axis(items.to_owned()),
            false => Items::Labels(items.split(", ").map(str::to_owned).collect()),
        };
        let (Self { shown, whole, rest, .. }, mut left) = (&*self, 0);
        let value = |(label, place): &(String, f64)| {
            let labels = [&self.labels[..], &[(name, label)]].concat();
            let mut formula = Formula { shown, whole, rest, labels };
            let value = formula.last();
            left = formula.rest.len();
            (*place, value)
        };
        let all = shown.items(&items).iter().map(value).collect();
        self.rest = &rest[rest.len() - left..];
        all
    }
}

/// Returns the place where values reach 0 from below, on a line between two of them. Infinity if
/// they never do; not a number, which `min` and `max` leave out, if the first one is not below.
fn crossing(all: &[(f64, f64)]) -> f64 {
    if all[0].1 >= 0.0 {
        return f64::NAN;
    }
    let between = all.windows(2).find(|pair| pair[0].1 < 0.0 && pair[1].1 >= 0.0);
    between.map_or(f64::INFINITY, |pair| {
        let [(from, low), (to, high)] = [pair[0], pair[1]];
        from + (to - from) * low / (low - high)
    })
}

/// Returns the place from which on values are below 0, between places that double; 0 if all are,
/// and infinity if the last one is not.
fn doubling(all: &[(f64, f64)]) -> f64 {
    let at = all.iter().rposition(|it| it.1 > 0.0).map_or(0, |last| last + 1);
    let (Some(before), Some(after)) = (at.checked_sub(1), all.get(at)) else {
        return if at == 0 { 0.0 } else { f64::INFINITY };
    };
    let ((place, low), high) = (all[before], -after.1);
    place * exp2(low / (low + high))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::parameters::Parameters;

    fn value(formula: &str) -> f64 {
        let found = &BTreeMap::from([("a|x".to_owned(), 8.0), ("a|y".to_owned(), 2.0)]);
        let texts = &BTreeMap::from([("half".to_owned(), "= [a|{of}] / 2".to_owned())]);
        let ticks = &BTreeMap::from([("axis", vec![("x".to_owned(), 1.0), ("y".to_owned(), 3.0)])]);
        let parameters = &Parameters::default();
        Shown { found, parameters, texts, ticks }.figure(formula, &[("of", "x")])
    }

    #[test]
    fn formulas_are_read_as_arithmetic_is_written() {
        for (formula, wanted) in [
            ("a|x", 8.0),
            ("= 1 + [a|{of}] - 2 * 3 / 4", 7.5),
            ("= 10 - (4 - 3) - 2", 7.0),
            ("= 1e3 * {half}", 4000.0),
            ("= max(floor(7 / 2); [a|y])", 3.0),
            ("= least(at: axis; [a|{at}]) + most(at: x, y; [a|{at}] + 1)", 11.0),
            ("= mean(of: y, y; [a|{of}])", 2.0),
            ("= best(at: axis; 0 - [a|{at}])", 3.0),
            ("= count(at: axis; [a|{at}] - 2)", 1.0),
            ("= crossing(at: axis; 5 - [a|{at}])", 2.0),
            ("= [gpu.linear] * 10", 6.0),
        ] {
            assert_eq!(value(formula), wanted, "{formula}");
        }
        assert!(value("= crossing(at: axis; [a|{at}])").is_nan());
    }

    #[test]
    fn what_is_no_formula_is_refused() {
        for formula in ["= (1", "= 1 2", "= [a|x", "= 1 + ", "= sum(1)", "= [a|z]", "a|{what}"] {
            assert!(std::panic::catch_unwind(|| value(formula)).is_err(), "{formula}");
        }
    }

    #[test]
    fn a_crossover_is_between_two_lengths_or_at_none() {
        let of = |loads: fn(f64) -> f64| {
            let lengths = (0..8).map(|at| f64::from(1 << at));
            let slower = lengths.map(|it| (it * 4.0, ln(loads(it) / it))).collect::<Vec<_>>();
            doubling(&slower)
        };
        assert_eq!(of(|_| 0.5), 0.0);
        assert_eq!(of(|computes| computes * 2.0), f64::INFINITY);
        // 8 of 1, 2, 4, 8, ...: the length in the fourth place.
        assert!((of(|_| 8.0) - 32.0).abs() < 1e-9, "{}", of(|_| 8.0));
    }
}
