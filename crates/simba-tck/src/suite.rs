//! From the list of cases to tests and to a registry. The list exists once.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::time::Duration;

use tokio::runtime::Builder;
use tokio::time::timeout;

use crate::{Fixture, skips};

/// The longest that a case may take; one that takes longer hangs.
pub const CASE_LIMIT: Duration = Duration::from_secs(60);

/// A case under way.
pub type CaseFuture<'a> = Pin<Box<dyn Future<Output = ()> + Send + 'a>>;

/// How a case came out that broke no promise.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Outcome {
    /// The promise is kept.
    Passed,
    /// Nothing was checked, for this reason: the [`Profile`](crate::Profile) says that the store cannot do it.
    Skipped(&'static str),
}

/// One promise and the code that checks it.
#[derive(Clone, Copy)]
#[non_exhaustive]
pub struct Case {
    /// What it is about: `renewal`.
    pub group: &'static str,
    /// The promise in short: `a_holder_outlives_its_lease`.
    pub name: &'static str,
    run: for<'a> fn(&'a dyn Fixture) -> CaseFuture<'a>,
}

impl Case {
    #[doc(hidden)]
    #[must_use]
    pub const fn new(
        group: &'static str,
        name: &'static str,
        run: for<'a> fn(&'a dyn Fixture) -> CaseFuture<'a>,
    ) -> Self {
        Self { group, name, run }
    }

    /// Checks the promise on this store. Returns whether it is kept, or was not checked.
    ///
    /// # Panics
    ///
    /// If it is broken, with a message that says which. Give it [`CASE_LIMIT`] at most.
    pub async fn run(&self, fixture: &dyn Fixture) -> Outcome {
        match skips::watch((self.run)(fixture)).await {
            None => Outcome::Passed,
            Some(reason) => {
                skips::record(self, reason);
                Outcome::Skipped(reason)
            }
        }
    }
}

impl fmt::Debug for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}::{}", self.group, self.name)
    }
}

/// All cases, for a program that runs them with progress. Tests use [`suite!`](crate::suite).
#[must_use]
pub fn cases() -> &'static [Case] {
    crate::__cases!(registry)
}

/// A handful of cases that touch every kind of call.
const SAMPLE: &[&str] = &[
    "a_wait_ends_with_the_release",
    "a_holder_outlives_its_lease",
    "they_grow_with_every_acquisition",
    "a_release_wakes_the_next",
    "waiters_are_served_in_order",
    "cuts_are_ridden_out",
    "a_lost_reply_is_no_ghost",
    "a_list_names_what_is_held",
    "a_probe_answers",
];

/// Runs a handful of cases that touch every kind of call: for another way to the same store, such as TLS or a user
/// with few rights, where all of them would tell nothing new.
///
/// # Panics
///
/// If a case does, or hangs.
pub async fn run_sample(fixture: &dyn Fixture) {
    for case in cases().iter().filter(|case| SAMPLE.contains(&case.name)) {
        let ended = tokio::time::timeout(CASE_LIMIT, case.run(fixture)).await;
        assert!(ended.is_ok(), "broken: {case:?} ends within {CASE_LIMIT:?}");
    }
}

/// Runs one case as a test, on a runtime of its own.
///
/// # Panics
///
/// If the case does, or hangs.
#[doc(hidden)]
pub fn run<F: Fixture>(fixture: impl FnOnce() -> F, case: Case) {
    run_within(CASE_LIMIT, fixture, case);
}

/// As [`run`], with another limit.
#[doc(hidden)]
#[allow(clippy::print_stdout)]
pub fn run_within<F: Fixture>(limit: Duration, fixture: impl FnOnce() -> F, case: Case) {
    crate::explain_failures();
    let runtime = Builder::new_multi_thread().worker_threads(2).enable_all().build();
    let runtime = runtime.unwrap_or_else(|error| panic!("the system gives no runtime: {error}"));
    let ended = runtime.block_on(async {
        // Within the runtime: a fixture may start tasks.
        let fixture = fixture();
        timeout(limit, case.run(&fixture)).await
    });
    runtime.shutdown_background();
    match ended {
        Ok(Outcome::Passed) => {}
        Ok(Outcome::Skipped(reason)) => println!("skipped: {reason}"),
        Err(_) => panic!("the case hangs: {case:?} is not through after {limit:?}"),
    }
}

/// Makes one `#[test]` of every case of the kit, in a module per group.
///
/// Takes an expression of a type that implements [`Fixture`]; each test evaluates it anew, within a tokio
/// runtime of the kit's own. So `cargo test renewal` runs one group, a failure names its promise, and a new
/// case reaches every backend by an upgrade. Two suites in one file go into modules of their own.
///
/// # Examples
///
/// See the [crate's documentation](crate).
#[macro_export]
macro_rules! suite {
    ($fixture:expr) => {
        fn fixture_of_the_suite() -> impl $crate::Fixture {
            $fixture
        }

        $crate::__cases!(tests);
    };
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn every_case_is_listed_once() {
        let names: HashSet<_> = cases().iter().map(|case| (case.group, case.name)).collect();
        assert_eq!(names.len(), cases().len());
        assert!(cases().len() >= 90, "a case is missing from the list");
    }

    #[test]
    fn every_case_of_the_sample_is_there_once() {
        let sampled = cases().iter().filter(|case| SAMPLE.contains(&case.name));
        assert_eq!(sampled.count(), SAMPLE.len());
    }
}
