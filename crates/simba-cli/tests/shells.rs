//! Shell completions, manual pages, and help with examples.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::fs;
use std::process::Command;

use common::{World, tool};

const COMMANDS: [&str; 13] = [
    "run",
    "lead",
    "schedule",
    "status",
    "ls",
    "watch",
    "release",
    "schema",
    "doctor",
    "tck",
    "bench",
    "completions",
    "man",
];

fn script(world: &World, shell: &str, file: &str) {
    let script = world.run(&["completions", shell]).expect(0).out;
    fs::write(world.path(file), script).unwrap();
}

/// Runs a shell in the directory of the world. Returns its output.
#[track_caller]
fn stdout_of(world: &World, mut shell: Command) -> String {
    shell.current_dir(world.dir.path()).env("HOME", world.dir.path()).env_remove("XDG_CONFIG_HOME");
    let output = common::output(&mut shell).unwrap();
    let err = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success() && err.is_empty(), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn bash_completes() {
    let world = World::new();
    script(&world, "bash", "simba.bash");
    let complete = "source ./simba.bash; complete -p simba >/dev/null || exit 1; \
                    words() { COMP_WORDS=(\"$@\"); COMP_CWORD=$(($# - 1)); COMPREPLY=(); \
                    _simba simba \"${@: -1}\" \"${@: -2:1}\"; echo \"${COMPREPLY[@]}\"; }; \
                    words simba ''; words simba sched; words simba run --max";
    let mut bash = tool("bash");
    bash.args(["--norc", "-c", complete]);
    let output = stdout_of(&world, bash);
    let lines: Vec<&str> = output.lines().collect();
    assert!(COMMANDS.iter().all(|command| lines[0].split(' ').any(|word| word == *command)), "{output}");
    assert_eq!((lines[1].trim(), lines[2].trim()), ("schedule", "--max-hold"), "{output}");
}

/// Tests of programs that are not installed everywhere.
mod with_tools {
    use super::*;

    #[test]
    fn zsh_loads_completions() {
        let world = World::new();
        script(&world, "zsh", "_simba");
        let load = "fpath=($PWD $fpath); autoload -Uz compinit; compinit -u -D; \
                    [[ ${_comps[simba]} == _simba ]] || exit 1; autoload +X _simba; echo ${+functions[_simba]}";
        let mut zsh = tool("zsh");
        zsh.args(["-f", "-c", load]);
        assert_eq!(stdout_of(&world, zsh).trim(), "1");
        let mut zsh = tool("zsh");
        zsh.args(["-n", "./_simba"]);
        stdout_of(&world, zsh);
    }

    #[test]
    fn fish_completes() {
        let world = World::new();
        script(&world, "fish", "simba.fish");
        let load = "source ./simba.fish; complete -C 'simba '; echo ==; complete -C 'simba run --max'";
        let mut fish = tool("fish");
        fish.args(["--no-config", "-c", load]);
        let output = stdout_of(&world, fish);
        let (commands, options) = output.split_once("==\n").unwrap();
        assert!(
            COMMANDS.iter().all(|command| commands.lines().any(|line| line.starts_with(command))),
            "{output}"
        );
        assert!(options.contains("--max-hold"), "{output}");
    }

    #[test]
    fn manual_pages_render_without_errors() {
        let world = World::new();
        let _ = tool("mandoc");
        for page in [None].into_iter().chain(COMMANDS.map(Some)) {
            let args: Vec<&str> = ["man"].into_iter().chain(page).collect();
            fs::write(world.path("page.1"), world.run(&args).expect(0).out).unwrap();
            let mut lint = Command::new("mandoc");
            lint.args(["-T", "lint", "-W", "error", "page.1"]);
            stdout_of(&world, lint);
            let mut man = tool("man");
            man.args(["-l", "page.1"]).env("MANPAGER", "cat").env("MANWIDTH", "80").env("LC_ALL", "C.UTF-8");
            let text = stdout_of(&world, man);
            let name = page.map_or("simba".into(), |page| format!("simba-{page}"));
            assert!(text.contains("NAME") && text.contains(&name), "{page:?}: {text}");
            assert!(text.contains("xample"), "{page:?} has no examples: {text}");
        }
    }
}

/// Returns the end of a help text, whose lines we break ourselves, for a terminal of the usual width.
fn examples(help: &str) -> impl Iterator<Item = &str> {
    help.lines().skip_while(|line| !line.starts_with("  -h, --help")).skip(1)
}

#[test]
fn every_command_has_help_with_an_example() {
    let world = World::new();
    for command in COMMANDS {
        let help = world.run(&[command, "--help"]).expect(0).out;
        assert!(help.contains("Example") && help.contains("simba "), "{command}: {help}");
        assert!(examples(&help).all(|line| line.chars().count() <= 84), "{command}: {help}");
    }
    let help = world.run(&["--help"]).expect(0).out;
    assert!(help.contains("Examples:") && help.contains("Exit codes:"), "{help}");
    assert!(examples(&help).all(|line| line.chars().count() <= 84), "{help}");
    assert!(COMMANDS.iter().all(|command| help.contains(command)));
    assert!(world.run(&["--version"]).expect(0).out.starts_with("simba "));
    // A call without arguments prints the help.
    let mut bare = world.bare();
    bare.args::<[&str; 0], &str>([]);
    let help = world.start(bare).wait().expect(2);
    assert!(help.err.contains("Examples:"), "{help:?}");
}
