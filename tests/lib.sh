# The steps of the gate, and what tests/all and tests/nightly share. Sourced, in the root of the repository.
# shellcheck shell=bash

me=$0
# Seconds after which a step is stopped and counts as failed.
step_limit=1500
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
steps=()
failed_steps=()

need_linker() {
    local package=()
    command -v cc >/dev/null || command -v gcc >/dev/null || command -v clang >/dev/null || package+=(gcc)
    [[ -e /usr/include/stdio.h || ! -d /etc/apt || ${#package[@]} -eq 0 ]] || package+=(libc6-dev)
    [[ ${#package[@]} -gt 0 ]] || return 0
    if [[ $(id -u) -eq 0 ]] && command -v apt-get >/dev/null; then
        echo "no C linker here: installing ${package[*]}"
        apt-get update -q
        DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "${package[@]}"
        return 0
    fi
    echo "$me: there is no C linker (cc). Install one, for example: sudo apt-get install gcc libc6-dev" >&2
    exit 1
}

need_rust() {
    [[ ! -d ${CARGO_HOME:-$HOME/.cargo}/bin ]] || PATH="$PATH:${CARGO_HOME:-$HOME/.cargo}/bin"
    local minimum used
    minimum=$(sed -n 's/^rust-version *= *"\(.*\)"/\1/p' Cargo.toml)
    if ! command -v cargo >/dev/null || ! command -v rustc >/dev/null; then
        echo "$me: there is no cargo here. Install Rust $minimum or later from https://rustup.rs" >&2
        echo "    (the cargo of Debian and Ubuntu packages is too old)." >&2
        exit 1
    fi
    used=$(rustc --version | cut -d' ' -f2)
    if [[ $(printf '%s\n' "$minimum" "${used%%-*}" | sort -V | head -n1) != "$minimum" ]]; then
        echo "$me: rustc is $used, but Cargo.toml asks for $minimum or later. Try: rustup update stable" >&2
        exit 1
    fi
    local component
    for component in fmt clippy; do
        cargo "$component" --version >/dev/null 2>&1 && continue
        if command -v rustup >/dev/null; then
            rustup component add "${component/#fmt/rustfmt}"
        else
            echo "$me: cargo $component is missing: install this toolchain's ${component/#fmt/rustfmt}" >&2
            exit 1
        fi
    done
}

# step NAME COMMAND...: runs the command, shows its output as it comes, and keeps its verdict.
# A command must return its own failures: `set -e` is off to the left of `||`.
step() {
    local name=$1 log="$work/${#steps[@]}.log" from=$SECONDS status=0
    shift
    echo
    echo "== $name"
    "$@" 2>&1 | tee "$log" || status=$?
    local verdict=ok
    if [[ $status -ne 0 ]]; then
        verdict=FAILED
        [[ $status -ne 124 ]] || verdict="FAILED (stopped after $((SECONDS - from)) s)"
        failed_steps+=("${#steps[@]}")
    fi
    steps+=("$(printf '%-44s %5d s  %s' "$name" $((SECONDS - from)) "$verdict")")
    echo "== $name: $verdict, $((SECONDS - from)) s"
}

limited() {
    timeout --kill-after=10 "$step_limit" "$@"
}

# tested COMMAND...: cargo test. A filter that matches no test is a failure.
tested() {
    limited "$@" | tee "$work/tested" || return
    if ! grep -qE '^test result: ok\. [1-9]' "$work/tested"; then
        echo "no test ran: $*"
        return 1
    fi
}

# What tests/all runs. `cargo test` builds every program once; no step builds any of them again.
gate() {
    step "cargo fmt" formatted
    step "cargo clippy" limited cargo clippy --locked --workspace --all-targets -- -D warnings
    step "cargo check, loom and mutants" configurations
    step "cargo doc" documented --workspace
    step "cargo test" everything
    step "main job, 50 steps, against --single" main_job
}

formatted() {
    cargo fmt --all --check || return
    # A workspace of its own.
    cargo fmt --manifest-path fuzz/Cargo.toml --check
}

# with_cfg CFG ARGUMENT COMMAND...: runs cargo with `--cfg CFG` in each compilation of this workspace that has
# the ARGUMENT. Dependencies are not built again.
with_cfg() {
    local cfg=$1 argument=$2 wrapper=$PWD/target/with-cfg/$1
    shift 2
    mkdir -p target/with-cfg
    cat >"$wrapper" <<EOF
#!/bin/sh
case " \$* " in
    *" $argument "*) exec "\$@" --cfg $cfg ;;
    *) exec "\$@" ;;
esac
EOF
    chmod +x "$wrapper"
    RUSTC_WORKSPACE_WRAPPER=$wrapper "$@"
}

# Whether the configurations of loom and of the mutants compile. Only tests/nightly runs their tests.
configurations() {
    with_cfg tensorwire_loom --test \
        limited cargo check --locked --package tensorwire --lib --profile test || return
    with_cfg tensorwire_mutants --crate-name \
        limited cargo check --locked --package tensorwire --lib --test simulation --profile test
}

documented() {
    RUSTDOCFLAGS="-D warnings" limited cargo doc --no-deps --locked "$@"
}

# With examples and doctests. Where spinning threads share a CPU the hot path takes forty rounds per
# scenario. The kill matrix has each cell, once or twice.
everything() {
    TENSORWIRE_TEST_SIM_SECONDS=10 TENSORWIRE_TEST_SHARED_CPU_ROUNDS=40 TENSORWIRE_TEST_KILLS=36 \
        tested cargo test --locked --workspace --no-fail-fast \
        --config 'target."cfg(all())".runner = "tests/runner"'
}

# main_job [release]: fifty steps of training by three processes, and the same by one process without the
# engine. The weights must be equal bit for bit. The build has the features of the other steps, so that Cargo
# builds nothing twice.
main_job() {
    local train=${CARGO_TARGET_DIR:-target}/${1:-debug}/examples/train engine single
    local options=(--servers 1 --workers 2 --steps 50 --batch 32 --seed 7)
    limited cargo build --locked --workspace --example train --profile "${1:-dev}" || return
    limited "$train" "${options[@]}" --json "$work/engine.json" || return
    limited "$train" "${options[@]}" --single --json "$work/single.json" || return
    engine=$(json_text "$work/engine.json" weights_digest)
    single=$(json_text "$work/single.json" weights_digest)
    echo "weights: $engine with the engine, $single without"
    [[ -n $engine && $engine == "$single" ]]
}

# json_text FILE KEY: the text of a key of a JSON file that the main job wrote.
json_text() {
    sed -n "s/.*\"$2\" *: *\"\([^\"]*\)\".*/\1/p" "$1"
}

# count_tests LOG: prints "passed failed skipped" of a log of cargo test, then one line for each skipped test.
#
# A test may run its own program again, whose result is in the log too: only the last result of each program
# counts. Doctests have two results, one of those compiled together and one of the others: both count. A test
# that prints "skipped:" has passed for cargo, and counts as skipped here.
count_tests() {
    awk '
        function close_section() { passed += p; failed += f; ignored += i; p = f = i = 0 }
        /^ +Running / || /^ +Doc-tests / {
            close_section(); section++; doc = /Doc-tests/; good = 0; name = ""
        }
        /^test result: / {
            if (!doc) p = f = i = 0
            for (n = 1; n < NF; n++) {
                if ($(n + 1) == "passed;") p += $n
                if ($(n + 1) == "failed;") f += $n
                if ($(n + 1) == "ignored;") i += $n
            }
            good = 0; name = ""
        }
        /^test .* \.\.\. ignored/ { said[++count] = "  ignored: " $2 }
        /^successes:$/ { good = 1; name = "" }
        /^failures:$/ { good = 0; name = "" }
        /^---- .* stdout ----$/ { name = good ? $2 : "" }
        /^skipped:/ {
            said[++count] = "  " $0 (name == "" ? "" : "  [" name "]")
            if (name == "") loose++
            else if (!((section, name) in seen)) { seen[section, name] = 1; own++ }
        }
        END {
            close_section()
            print passed - own, failed + 0, own + loose + ignored
            for (n = 1; n <= count; n++) print said[n]
        }
    ' "$1"
}

# failed_tests LOG: prints each failed test of a log of cargo test with the first lines of its output, since
# the whole log is long, and often cut.
failed_tests() {
    awk '
        /^ +Running / || /^ +Doc-tests / || /^successes:$/ { failures = 0; left = 0 }
        /^failures:$/ { failures = 1; left = 0; next }
        failures && /^---- .* stdout ----$/ {
            gsub(/^---- | stdout ----$/, "")
            left = 40; print "  " $0; next
        }
        left > 0 { left--; print "    " $0 }
    ' "$1"
}

# Prints the seconds of each step, the skipped and the failed tests, and the sum. Fails if anything failed.
summary() {
    local passed=0 failed=0 skipped=0 at p f s line
    echo
    echo "== summary"
    printf '%s\n' "${steps[@]}"
    local reasons="$work/reasons"
    : >"$reasons"
    for at in "${!steps[@]}"; do
        count_tests "$work/$at.log" >"$work/counts"
        read -r p f s <"$work/counts"
        tail -n +2 "$work/counts" >>"$reasons"
        failed_tests "$work/$at.log" >>"$work/failures"
        # A step that failed without a failed test (lints, a build, a hang) is one failure.
        for line in "${failed_steps[@]}"; do
            [[ $line -ne $at || $f -gt 0 ]] || f=1
        done
        passed=$((passed + p)) failed=$((failed + f)) skipped=$((skipped + s))
    done
    if [[ -s $reasons ]]; then
        echo "skipped tests:"
        sort "$reasons" | uniq -c | sed 's/^ *1   /  /'
    fi
    if [[ -s $work/failures ]]; then
        echo "failed tests:"
        cat "$work/failures"
    fi
    echo "$((SECONDS / 60)) min $((SECONDS % 60)) s in all"
    local closing="$passed passed, $failed failed"
    [[ $skipped -eq 0 ]] || closing+=", $skipped skipped"
    echo "$closing"
    [[ $failed -eq 0 ]]
}

need_linker
need_rust
export CARGO_TERM_COLOR=never
# A cold build without incremental state is smaller and no slower.
export CARGO_INCREMENTAL=0
