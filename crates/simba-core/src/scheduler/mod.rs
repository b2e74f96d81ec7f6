//! Jobs that run on the leader only: [`Schedule`] defines when, [`Scheduler`] and [`Job`] run them.

#[cfg(feature = "cron")]
mod cron;
mod job;
mod schedule;

pub use job::{Job, Progress, Scheduler};
pub use schedule::Schedule;
