//! The measuring loop: ranks as threads that go through all cases together.
//!
//! Invariant: a rank that fails aborts the group, so that every rank ends with the first failure
//! instead of waiting. Start reading at [`measure`].

use std::{
    sync::{Mutex, PoisonError, mpsc},
    thread,
};

use anyhow::{Error, Result, anyhow};
use paceline_comm::{Collective, Communicator, Group, GroupOptions, Rank, in_process};

use super::{
    place::Place,
    plan::{Case, Form, Plan},
};
use crate::command::bench::samples::Samples;

/// What the calls of a case took.
pub(super) struct Measured {
    pub(super) case: Case,
    /// Of one call, the slowest rank's, without making inputs; by repetition.
    pub(super) seconds: Samples,
    /// Of making one input, the slowest rank's; by repetition, in the dependent form.
    pub(super) producer_seconds: Samples,
    /// Elements on all ranks that are not the exact sum.
    pub(super) wrong: u64,
    /// The back end that the policy chose.
    pub(super) served_by: &'static str,
}

/// A back end's cases, as many as were measured, and what ended the measurement early.
pub(super) struct Outcome {
    pub(super) measured: Vec<Measured>,
    pub(super) failure: Option<Error>,
}

/// Measures all cases of `plan` with one back end. `place` makes a rank's place, in its thread;
/// `step` is called after each case.
pub(super) fn measure(
    plan: &Plan,
    backend: &str,
    place: impl Fn(usize) -> Result<Box<dyn Place>> + Sync,
    mut step: impl FnMut(),
) -> Outcome {
    let mut options = GroupOptions { timeout: plan.timeout, ..GroupOptions::default() };
    options.inbox.in_host_memory = plan.host_staged;
    let groups = match in_process(plan.world, &options) {
        Ok(groups) => groups,
        Err(error) => return Outcome { measured: Vec::new(), failure: Some(error.into()) },
    };
    let failure = Mutex::new(None);
    let (done, steps) = mpsc::channel();
    let ranks = thread::scope(|scope| {
        let start = |group: Group| {
            let (failure, place, done) = (&failure, &place, done.clone());
            scope.spawn(move || {
                let mut rank = RankRun { plan, cases: Vec::new(), done };
                // Kept until all have ended: a rank that leaves fails those that still wait.
                let communicator = rank.run(group, backend, place, failure);
                (rank.cases, communicator)
            })
        };
        let threads: Vec<_> = groups.into_iter().map(start).collect();
        drop(done);
        steps.iter().for_each(|()| step());
        let join = |(rank, thread): (usize, thread::ScopedJoinHandle<'_, _>)| {
            thread.join().map_err(|_| rank)
        };
        threads.into_iter().enumerate().map(join).collect::<Vec<Result<_, usize>>>()
    });
    let mut failure = failure.into_inner().unwrap_or_else(PoisonError::into_inner);
    if let Some(rank) = ranks.iter().find_map(|rank| rank.as_ref().err()) {
        failure = Some(anyhow!("the thread of rank {rank} panicked; its message is above"));
    }
    let ranks: Vec<Vec<RankCase>> =
        ranks.into_iter().filter_map(|rank| rank.ok().map(|(cases, _)| cases)).collect();
    Outcome { measured: merge(plan, &ranks), failure }
}

/// What one rank found in a case.
struct RankCase {
    repetitions: Vec<Repetition>,
    wrong: u64,
    served_by: &'static str,
}

/// Seconds of all calls of a repetition.
#[derive(Clone, Copy)]
struct Repetition {
    /// The making of inputs included.
    calls: f64,
    producers: f64,
}

/// Joins what the ranks found, for the cases that all of them finished.
fn merge(plan: &Plan, ranks: &[Vec<RankCase>]) -> Vec<Measured> {
    let finished = match ranks.len() == plan.world {
        true => ranks.iter().map(Vec::len).min().unwrap_or(0),
        false => 0,
    };
    let measured = |(index, &case): (usize, &Case)| {
        let slowest = |seconds: fn(&Repetition) -> f64| -> Samples {
            let of = |repetition: usize| {
                let ranks = ranks.iter().map(|rank| &rank[index].repetitions[repetition]);
                ranks.map(seconds).fold(f64::NEG_INFINITY, f64::max) / case.calls as f64
            };
            (0..plan.repetitions).map(of).collect()
        };
        Measured {
            case,
            seconds: slowest(|repetition| repetition.calls - repetition.producers),
            producer_seconds: match case.form {
                Form::Independent => Samples::default(),
                Form::Dependent => slowest(|repetition| repetition.producers),
            },
            wrong: ranks.iter().map(|rank| rank[index].wrong).sum(),
            served_by: ranks[0][index].served_by,
        }
    };
    plan.cases.iter().enumerate().take(finished).map(measured).collect()
}

/// One rank on its way through the cases.
struct RankRun<'a> {
    plan: &'a Plan,
    cases: Vec<RankCase>,
    done: mpsc::Sender<()>,
}

impl RankRun<'_> {
    fn run(
        &mut self,
        mut group: Group,
        backend: &str,
        place: &(impl Fn(usize) -> Result<Box<dyn Place>> + Sync),
        failure: &Mutex<Option<Error>>,
    ) -> Option<Communicator> {
        let rank = group.rank();
        let abort = group.abort_handle();
        let fail = |error: Error| {
            let reason = format!("{error:#}");
            let mut first = failure.lock().unwrap_or_else(PoisonError::into_inner);
            first.get_or_insert_with(|| error.context(format!("rank {rank}")));
            abort.abort(&reason);
        };
        // What a place loads or allocates must be there before any rank communicates.
        let place = place(rank.index()).and_then(|place| {
            group.exchange(&[])?;
            Ok(place)
        });
        let mut place = place.map_err(&fail).ok()?;
        let group = match place.gpu() {
            Some(ordinal) => group.on_device(ordinal),
            None => group,
        };
        let connected = Communicator::connect(group, Some(backend));
        let mut communicator = connected.map_err(|error| fail(error.into())).ok()?;
        match self.all_cases(place.as_mut(), &mut communicator) {
            Ok(()) => Some(communicator),
            Err(error) => {
                fail(error);
                None
            }
        }
    }

    fn all_cases(&mut self, place: &mut dyn Place, communicator: &mut Communicator) -> Result<()> {
        for case in &self.plan.cases {
            let found = self.case(case, place, communicator)?;
            self.cases.push(found);
            if communicator.rank() == Rank(0) {
                // Whoever listens no more ends this soon.
                let _ = self.done.send(());
            }
        }
        Ok(())
    }

    fn case(
        &self,
        case: &Case,
        place: &mut dyn Place,
        communicator: &mut Communicator,
    ) -> Result<RankCase> {
        let choice = communicator.backend_for(Collective::AllReduce, case.dtype, case.bytes())?;
        let (warm_up, all) = (self.plan.warm_up, self.plan.warm_up + self.plan.repetitions);
        place.prepare(case, communicator)?;
        let mut repetitions = Vec::with_capacity(self.plan.repetitions);
        for repetition in 0..all {
            let mut producers = 0.0;
            if case.form == Form::Dependent {
                meet(communicator)?;
                producers = place.time_producers()?;
            }
            meet(communicator)?;
            let calls = place.time_calls(communicator)?;
            if repetition >= warm_up {
                repetitions.push(Repetition { calls, producers });
            }
        }
        meet(communicator)?;
        let wrong = place.wrong()?;
        meet(communicator)?;
        Ok(RankCase { repetitions, wrong, served_by: choice.name })
    }
}

/// Waits until all ranks are here, whatever the back end can do: over the control channel.
fn meet(communicator: &mut Communicator) -> Result<()> {
    for root in 0..communicator.world_size() {
        communicator.broadcast_bytes_in_time(&mut Vec::new(), Rank(root))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::{sync::Arc, time::Duration};

    use anyhow::bail;
    use paceline_kernels::DType;

    use super::{
        super::{host, inputs::Inputs},
        *,
    };
    use crate::args::ModeArgument;

    fn plan(world: usize) -> Plan {
        let case = |form| Case { form, shape: [1, 5000], dtype: DType::BF16, calls: 3 };
        Plan {
            world,
            mode: ModeArgument::Eager,
            fused: false,
            host_staged: false,
            cases: vec![case(Form::Independent), case(Form::Dependent)],
            warm_up: 1,
            repetitions: 2,
            timeout: Duration::from_secs(20),
        }
    }

    /// A host place that spoils one output, or fails, in the second case.
    struct Bad {
        inner: Box<dyn Place>,
        fails: bool,
        cases: usize,
    }

    impl Place for Bad {
        fn gpu(&self) -> Option<u32> {
            self.inner.gpu()
        }

        fn prepare(&mut self, case: &Case, communicator: &mut Communicator) -> Result<()> {
            self.cases += 1;
            self.inner.prepare(case, communicator)
        }

        fn time_producers(&mut self) -> Result<f64> {
            self.inner.time_producers()
        }

        fn time_calls(&mut self, communicator: &mut Communicator) -> Result<f64> {
            if self.fails && self.cases == 2 {
                bail!("the device went away");
            }
            self.inner.time_calls(communicator)
        }

        fn wrong(&mut self) -> Result<u64> {
            // The contents of before the calls are sums of another shift.
            if !self.fails && self.cases == 2 {
                self.inner.time_producers()?;
            }
            self.inner.wrong()
        }
    }

    fn run(world: usize, bad_rank: Option<(usize, bool)>) -> Outcome {
        let plan = plan(world);
        let inputs = Arc::new(Inputs::new(world));
        let place = |rank: usize| {
            let inner = host::place(rank, DType::BF16, inputs.clone())?;
            Ok(match bad_rank {
                Some((bad, fails)) if bad == rank => {
                    Box::new(Bad { inner, fails, cases: 0 }) as Box<dyn Place>
                }
                _ => inner,
            })
        };
        measure(&plan, "host", place, || ())
    }

    #[test]
    fn every_case_has_a_time_of_each_repetition_and_no_wrong_element() {
        let outcome = run(3, None);
        assert!(outcome.failure.is_none());
        assert_eq!(outcome.measured.len(), 2);
        for measured in &outcome.measured {
            assert_eq!((measured.seconds.iter().count(), measured.wrong), (2, 0));
            assert_eq!(measured.served_by, "host");
        }
        assert!(outcome.measured[0].seconds.least() > 0.0);
        assert!(outcome.measured[1].producer_seconds.least() > 0.0);
    }

    #[test]
    fn wrong_elements_are_counted() {
        let outcome = run(2, Some((1, false)));
        assert_eq!(outcome.measured[0].wrong, 0);
        assert!(outcome.measured[1].wrong > 2000, "{}", outcome.measured[1].wrong);
    }

    #[test]
    fn a_rank_that_fails_ends_all_with_its_reason() {
        let outcome = run(3, Some((1, true)));
        let text = format!("{:#}", outcome.failure.unwrap());
        assert_eq!(text, "rank 1: the device went away");
        assert_eq!(outcome.measured.len(), 1, "the case before it counts");
    }

    #[test]
    fn a_back_end_that_is_not_there_gives_its_reason() {
        let plan = plan(2);
        let place = |rank| host::place(rank, DType::BF16, Arc::new(Inputs::new(2)));
        let outcome = measure(&plan, "nothing", place, || ());
        let text = format!("{:#}", outcome.failure.unwrap());
        assert!(text.contains("there is no back end `nothing`"), "{text}");
    }
}
