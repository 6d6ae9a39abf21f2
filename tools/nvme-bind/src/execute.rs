//! Executes steps, recording each in the journal first.

use crate::journal::{Journal, Phase, Record};
use crate::machine::Machine;
use crate::pci::Function;
use crate::pci::Root;
use crate::persist;
use crate::plan::{self, Step};
use crate::problem::{Kind, Problem, Result};

/// Context in which steps are executed.
pub(crate) struct Site<'a> {
    pub(crate) root: &'a Root,
    pub(crate) machine: &'a dyn Machine,
    pub(crate) journal: &'a Journal,
}

impl Site<'_> {
    /// Binds all drives of `records`, or none: if a step fails, the completed steps are undone.
    pub(crate) fn bind(&self, mut records: Vec<Record>) -> Result<()> {
        // All intentions are durable before the first change.
        let mut outcome = records.iter().try_for_each(|record| self.save(record));
        let is_begun = outcome.is_ok();
        for record in &mut records {
            outcome = outcome.and_then(|()| self.run(record, Phase::Bound));
        }
        let Err(cause) = outcome else { return Ok(()) };
        let mut left = Vec::new();
        for record in records.iter().rev() {
            let undone = self.undo(record);
            left.extend(undone.err().map(|problem| format!("{}: {problem}", record.bdf)));
        }
        if left.is_empty() || !is_begun {
            let what = if is_begun { "everything was put back" } else { "nothing was changed" };
            return Err(Problem { message: format!("{}; {what}", cause.message), ..cause });
        }
        let message = format!("{}; and putting it back failed: {}", cause.message, left.join("; "));
        Err(half_done(message))
    }

    /// Restores one drive to its state before a failed bind.
    fn undo(&self, record: &Record) -> Result<()> {
        if record.steps.iter().any(|step| matches!(step, Step::Write { .. })) {
            return self.release(record, false, true);
        }
        // It was on VFIO before, and stays there, with its previous record.
        let (records, _) = self.journal.read(self.root);
        let created = record.touched();
        for step in persist::unshared(created.clone(), record.bdf, &records) {
            let failed = |error| Problem::io(step.line(), &error);
            self.machine.run(&step).map_err(failed)?;
        }
        let mut before =
            Record { phase: Phase::Bound, steps: Vec::new(), done: 0, ..record.clone() };
        before.persist.retain(|step| !is_among(step, &created));
        if before.former.is_none() && before.persist.is_empty() {
            return self.journal.remove(self.root, self.machine, record.bdf);
        }
        self.save(&before)
    }

    /// Releases one drive, in any state. `forget` removes the files that bind it at boot; `undo`
    /// means that its record is of a failed bind.
    pub(crate) fn release(&self, record: &Record, forget: bool, undo: bool) -> Result<()> {
        let mut record = self.releasing(record, forget, undo);
        self.save(&record)?;
        self.run(&mut record, Phase::Released)?;
        if record.persist.is_empty() {
            self.journal.remove(self.root, self.machine, record.bdf)?;
        }
        Ok(())
    }

    /// Plans a release from the current state of the machine, and returns its record.
    fn releasing(&self, record: &Record, forget: bool, undo: bool) -> Record {
        let (records, _) = self.journal.read(self.root);
        // A failed bind must leave nothing behind, regardless of `forget`; an unfinished release
        // continues.
        let unfinished = undo || matches!(record.phase, Phase::Binding | Phase::Releasing);
        let mut files = if unfinished { record.touched() } else { Vec::new() };
        if forget {
            files.extend(record.kept());
        }
        files.sort();
        files.dedup();
        let kept = record.persist.iter().filter(|step| !is_among(step, &files));
        let persist = kept.cloned().collect();
        // The files first: remaining ones would bind the drive at the next boot.
        let mut steps = persist::unshared(files, record.bdf, &records);
        // A different card in the slot is left alone.
        let function = Function::read(self.root, record.bdf);
        if let Some(function) = function.filter(|function| function.ids() == record.ids) {
            steps.extend(plan::release(self.root, &function, record.former.as_ref()));
        }
        Record { phase: Phase::Releasing, steps, done: 0, persist, ..record.clone() }
    }

    fn run(&self, record: &mut Record, finally: Phase) -> Result<()> {
        for index in 0..record.steps.len() {
            let step = &record.steps[index];
            self.machine.run(step).map_err(|error| {
                let hint = "`dmesg | tail` has the kernel's reason";
                let message =
                    format!("{}: step {}, `{}`: {error}", record.bdf, index + 1, step.line());
                Problem::new(Kind::Failed, message, hint)
            })?;
            record.done = index + 1;
            if record.done < record.steps.len() {
                self.save(record)?;
            }
        }
        record.phase = finally;
        self.save(record)
    }

    fn save(&self, record: &Record) -> Result<()> {
        self.journal.save(self.root, self.machine, record)
    }
}

fn is_among(step: &Step, files: &[String]) -> bool {
    step.creates().is_some_and(|path| files.iter().any(|file| file == path))
}

/// Returns the problem of a drive left between two drivers.
pub(crate) fn half_done(message: String) -> Problem {
    let hint = "`nvme-bind status` shows how far it got, `nvme-bind restore` puts it back";
    Problem::new(Kind::HalfDone, message, hint)
}
