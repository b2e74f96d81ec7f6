//! The command-line arguments.

use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand};
use clap_complete::Shell;

/// The help below the list of commands.
const AFTER: &str = "\
Examples:
  simba run nightly-backup -- ./backup.sh        one at a time, for this user
  simba --on redis://cache run deploy -- ./go    one at a time, in the whole fleet
  simba status nightly-backup                    the holder, since when, until when

Without --on, the store is that of SIMBA_URL, else that of the configuration file,
else a SQLite file of this user, which needs no server.

Exit codes: 1 held by another, 2 usage, 69 store unreachable, 74 output not
written, 75 lost while the command ran, 76 foreign data in the store, 77 permission
denied, 78 invalid configuration, 124 --max-hold exceeded, 126 command not
executable, 127 command not found, 128 + n command ended by signal n; otherwise
the exit code of the command.";

/// A distributed mutex for commands: flock(1) for a fleet.
#[derive(Debug, Parser)]
#[command(name = "simba", version, after_help = AFTER, arg_required_else_help = true)]
pub(crate) struct Cli {
    /// The store: sqlite:PATH, postgres://…, mysql://…, redis://…, zookeeper://…, etcd://…, memory:
    #[arg(long = "on", value_name = "URL", global = true)]
    pub(crate) url: Option<String>,

    /// Configuration file, TOML or YAML [default: SIMBA_CONFIG, or simba/config.toml in ~/.config or /etc]
    #[arg(long, value_name = "FILE", global = true)]
    pub(crate) config: Option<PathBuf>,

    /// Log more; repeat to log everything
    #[arg(short, long, action = clap::ArgAction::Count, global = true)]
    pub(crate) verbose: u8,

    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Wait for a mutex, run a command under it, and return its exit code
    Run(RunArgs),
    /// Contend until stopped; run a command while leading
    Lead(LeadArgs),
    /// Run a command repeatedly, on the leader only
    Schedule(ScheduleArgs),
    /// Show who holds a mutex, since when, until when, and how many wait
    #[command(after_help = "\
Examples:
  simba status nightly-backup deploy
  simba status --json deploy | jq .[0].owner

--json prints an array with one object per mutex: mutex, state (held, free,
unknown), owner, host, pid, token, acquired_at, expires_in_ms, in_transition,
waiters; a value that the store does not know is null.")]
    Status(StatusArgs),
    /// List all mutexes in the store
    #[command(after_help = "\
Example:
  simba ls --json | jq -r '.[] | select(.state == \"held\") | .mutex'

The fields of --json are those of `simba status`.")]
    Ls(FormatArgs),
    /// Print a line for every change of owner
    #[command(after_help = "\
Examples:
  simba watch deploy
  simba watch --json | jq -r 'select(.state == \"free\") | .mutex'

A line of --json has at, mutex, state (held, free, unknown), owner, host, pid,
token.")]
    Watch(StatusArgs),
    /// Free a stuck mutex without its holder
    Release(ReleaseArgs),
    /// Print the statements that set up the store, or execute them
    #[command(after_help = "\
Examples:
  simba --on postgres://db/app schema > simba.sql
  simba --on postgres://owner@db/app schema --apply")]
    Schema(SchemaArgs),
    /// Check the store for settings that endanger mutexes
    #[command(after_help = "\
Example:
  simba --on redis://cache doctor

Every finding comes with a fix; the exit code is 1 if there is a finding.")]
    Doctor(FormatArgs),
    /// Run the conformance suite against the store
    Tck(TckArgs),
    /// Measure the store: lock/unlock cycles, hand-over, many held mutexes
    Bench(BenchArgs),
    /// Print a completion script
    #[command(after_help = "\
Examples:
  simba completions bash > /etc/bash_completion.d/simba
  simba completions zsh > /usr/share/zsh/vendor-completions/_simba
  simba completions fish > ~/.config/fish/completions/simba.fish")]
    Completions {
        /// The shell
        shell: Shell,
    },
    /// Print the manual page of the program or of one command
    #[command(after_help = "\
Examples:
  simba man | man -l -
  simba man run > /usr/local/share/man/man1/simba-run.1")]
    Man {
        /// The command; without it, the page of the program
        command: Option<String>,
    },
}

/// The options of a lease.
#[derive(Clone, Copy, Debug, Args)]
pub(crate) struct LeaseArgs {
    /// Time within which the holder must renew [default: 10s]
    #[arg(long, value_name = "TIME", value_parser = time)]
    pub(crate) ttl: Option<Duration>,

    /// Extra time before another may acquire [default: 6s]
    #[arg(long, value_name = "TIME", value_parser = time)]
    pub(crate) transition: Option<Duration>,

    /// How long before the deadline the command gets TERM [default: half the transition]
    #[arg(long, value_name = "TIME", value_parser = time)]
    pub(crate) grace: Option<Duration>,
}

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  simba run nightly-backup -- ./backup.sh
  simba run -n deploy -- ./deploy.sh      fail at once if another holds it
  simba run -w 30s -E 99 migrate -- ./m   wait 30 s at most, then exit with 99

The command gets SIMBA_MUTEX, SIMBA_CONTENDER_ID and SIMBA_FENCING_TOKEN. If the
mutex is lost, the command gets TERM. Before another can hold the mutex, the command
and all processes that it started are killed. The exit code is then 75.")]
pub(crate) struct RunArgs {
    /// The mutex
    pub(crate) mutex: String,

    /// Fail at once if the mutex is held by another
    #[arg(short = 'n', long = "nonblock", visible_alias = "nb", conflicts_with = "wait")]
    pub(crate) nonblock: bool,

    /// Wait at most this long; a number without a unit counts seconds
    #[arg(short, long, visible_alias = "timeout", value_name = "TIME", value_parser = wait_time)]
    pub(crate) wait: Option<Duration>,

    /// Exit code if the mutex is not acquired
    #[arg(short = 'E', long = "conflict-exit-code", value_name = "CODE", default_value_t = 1)]
    pub(crate) conflict: u8,

    /// Hold the mutex at most this long; a command that runs longer is ended
    #[arg(long, value_name = "TIME", value_parser = time)]
    pub(crate) max_hold: Option<Duration>,

    /// Keep the mutex at least this long, even if the command ends earlier
    #[arg(long, value_name = "TIME", value_parser = time)]
    pub(crate) min_hold: Option<Duration>,

    #[command(flatten)]
    pub(crate) lease: LeaseArgs,

    /// The command and its arguments
    #[arg(last = true, required = true, value_name = "COMMAND")]
    pub(crate) command: Vec<OsString>,
}

/// Parses a duration with its unit.
fn time(text: &str) -> Result<Duration, String> {
    humantime::parse_duration(text).map_err(|_| "write it as `250ms`, `10s` or `5m`".into())
}

/// Parses a duration; a number without a unit counts seconds, as with flock(1).
fn wait_time(text: &str) -> Result<Duration, String> {
    match text.parse::<f64>() {
        Ok(seconds) => Duration::try_from_secs_f64(seconds).map_err(|error| error.to_string()),
        Err(_) => time(text),
    }
}

/// The options of a command that runs while this process leads, until it is stopped.
#[derive(Debug, Args)]
pub(crate) struct ServiceArgs {
    /// Serve /metrics, /live and /ready (ready = leading) at this address
    #[arg(long, value_name = "ADDR")]
    pub(crate) metrics: Option<SocketAddr>,

    #[command(flatten)]
    pub(crate) lease: LeaseArgs,

    /// The command and its arguments
    #[arg(last = true, required = true, value_name = "COMMAND")]
    pub(crate) command: Vec<OsString>,
}

#[derive(Debug, Args)]
#[command(after_help = "\
Example:
  simba --on postgres://db/app lead cleaner -- ./cleaner

The command gets TERM when leadership is lost, and is started again when it is
regained. If it ends by itself, another contender leads next. SIGTERM is passed on;
leadership is kept until the command has ended, and then released.")]
pub(crate) struct LeadArgs {
    /// The mutex
    pub(crate) mutex: String,

    #[command(flatten)]
    pub(crate) service: ServiceArgs,
}

#[derive(Debug, Args)]
#[command(group = clap::ArgGroup::new("when").required(true).args(["every", "delay", "cron"]), after_help = "\
Examples:
  simba schedule report --every 15m -- ./report
  simba schedule backup --cron '30 2 * * *' --tz Europe/Berlin -- ./backup.sh

SIGTERM is passed on; leadership is kept until the command has ended, and then
released.")]
pub(crate) struct ScheduleArgs {
    /// The mutex
    pub(crate) mutex: String,

    /// Start at this interval; a missed run is skipped
    #[arg(long, value_name = "TIME", value_parser = time)]
    pub(crate) every: Option<Duration>,

    /// Wait this long between the end of a run and the next start
    #[arg(long, value_name = "TIME", value_parser = time)]
    pub(crate) delay: Option<Duration>,

    /// Start at these times: minute hour day month weekday
    #[arg(long, value_name = "EXPRESSION")]
    pub(crate) cron: Option<String>,

    /// The time zone of --cron [default: the machine's]
    #[arg(long, value_name = "ZONE", requires = "cron")]
    pub(crate) tz: Option<String>,

    #[command(flatten)]
    pub(crate) service: ServiceArgs,
}

#[derive(Clone, Copy, Debug, Args)]
pub(crate) struct FormatArgs {
    /// Print JSON instead of text
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct StatusArgs {
    /// The mutexes [default: all]
    pub(crate) mutexes: Vec<String>,

    #[command(flatten)]
    pub(crate) format: FormatArgs,
}

#[derive(Debug, Args)]
#[command(group = clap::ArgGroup::new("condition").required(true).args(["if_token", "if_owner", "force"]), after_help = "\
The old holder continues until its next renewal fails: until then two commands may
run at once. Their fencing tokens differ.

Example:
  simba release nightly-backup --if-token 1763204159000000")]
pub(crate) struct ReleaseArgs {
    /// The mutex
    pub(crate) mutex: String,

    /// Release only if this is the holder's fencing token
    #[arg(long, value_name = "TOKEN")]
    pub(crate) if_token: Option<u64>,

    /// Release only if this is the holder
    #[arg(long, value_name = "ID")]
    pub(crate) if_owner: Option<String>,

    /// Release without a condition
    #[arg(long)]
    pub(crate) force: bool,

    /// Do not ask for confirmation
    #[arg(short, long)]
    pub(crate) yes: bool,
}

#[derive(Debug, Args)]
pub(crate) struct SchemaArgs {
    /// Execute the statements
    #[arg(long)]
    pub(crate) apply: bool,
}

#[derive(Debug, Args)]
#[command(after_help = "\
Each case checks one guarantee with its own mutexes. The suite takes one to two
minutes; the store stays usable meanwhile. A case that needs a capability which the
store does not have is skipped. The exit code is 1 if a guarantee is broken.

--json prints kept, skipped and broken, each a number, and cases with case,
outcome (kept, skipped, broken) and reason.

Example:
  simba --on postgres://db/app tck session")]
pub(crate) struct TckArgs {
    /// Run only cases with this text in their name
    #[arg(default_value = "", hide_default_value = true)]
    pub(crate) filter: String,

    #[command(flatten)]
    pub(crate) format: FormatArgs,
}

#[derive(Clone, Copy, Debug, Args)]
#[command(after_help = "\
Takes about a minute, with --quick a few seconds. The names of its mutexes start
with simba-bench: and the mutexes are free afterwards. The store stays usable
meanwhile, but is under load. For a SQLite file, it measures a temporary file on
the same disk, and how long `simba run` takes to start a command, compared with
flock(1).

Examples:
  simba bench --quick
  simba --on redis://cache bench --json | jq '.rows[] | {measure, ours, unit}'

--json prints store, quick, and rows with target, measure, unit, ours, floor,
ratio; a missing value is null.")]
pub(crate) struct BenchArgs {
    /// Measure for a shorter time, with less precise results
    #[arg(long)]
    pub(crate) quick: bool,

    /// Number of tasks that lock and unlock at once, each with its own mutex
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u16).range(1..=4096))]
    pub(crate) tasks: u16,

    /// Number of contenders that wait for one mutex
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u16).range(1..=4096))]
    pub(crate) waiters: u16,

    /// Number of mutexes that are held at once
    #[arg(long, value_name = "N", default_value_t = 1000, value_parser = clap::value_parser!(u16).range(1..))]
    pub(crate) held: u16,

    #[command(flatten)]
    pub(crate) format: FormatArgs,
}
