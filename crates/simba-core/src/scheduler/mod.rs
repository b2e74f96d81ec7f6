//! Jobs that run on the leader alone: [`Schedule`] says when, [`Scheduler`] and [`Job`] see to it.

#[cfg(feature = "cron")]
mod cron;
mod job;
mod schedule;

pub use job::{Job, Progress, Scheduler};
pub use schedule::Schedule;
