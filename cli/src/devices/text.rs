//! The report for people.

use super::{DeviceReport, refused};
use std::fmt::Write;
use std::path::Path;
use tensorwire::internals::fabric::verbs::device::{Choice, Choices, Device, DevicePort, Limits, UserAccess};

/// Shown for facts that the kernel's files don't have.
const ASK_LIBRARY: &str = "not shown by the kernel";

/// The report, ready to print.
pub fn render(report: &DeviceReport) -> String {
    let mut text = String::new();
    for (device, (file, access)) in report.found.devices.iter().zip(&report.files) {
        // Writing to a String does not fail.
        let _ = show_device(&mut text, device, file.as_deref(), access);
    }
    if let Ok(Choices { rails, passed_over }) = &report.choices {
        for choice in rails {
            let rail = (rails.len() > 1).then_some(choice.rail);
            let _ = show_choice(&mut text, choice, rail);
        }
        for why in passed_over {
            let _ = writeln!(text, "not used: {why}");
        }
    }
    if let (Some(library), false) = (&report.library, report.found.devices.is_empty()) {
        let _ = writeln!(text, "libibverbs: {}", library.display());
    }
    for why in &report.untold {
        let _ = writeln!(text, "limits and MTUs are not known: {why}");
    }
    text
}

fn show_device(
    text: &mut String,
    device: &Device,
    file: Option<&Path>,
    access: &UserAccess,
) -> std::fmt::Result {
    write!(text, "{}: {}", device.name, device.node_type)?;
    if !device.firmware.is_empty() {
        write!(text, ", firmware {}", device.firmware)?;
    }
    if let Some(bus) = &device.bus {
        write!(text, ", at {bus}")?;
    }
    match device.numa_node {
        Some(node) => write!(text, ", NUMA node {node}")?,
        None => write!(text, ", no NUMA node")?,
    }
    if let Some(file) = file {
        write!(text, ", {}", file.display())?;
    }
    writeln!(text)?;
    if let Some(why) = refused(&device.name, access) {
        writeln!(text, "  {why}")?;
    }
    if let Some(why) = device.unusable() {
        writeln!(text, "  not for this fabric: {why}")?;
    }
    for port in &device.ports {
        show_port(text, port)?;
    }
    match &device.limits {
        Some(limits) => show_limits(text, limits)?,
        None => writeln!(text, "  limits: {ASK_LIBRARY}")?,
    }
    writeln!(text)
}

fn show_port(text: &mut String, port: &DevicePort) -> std::fmt::Result {
    write!(text, "  port {}: {} ({}), {}", port.number, port.state, port.physical, port.link)?;
    if let Some(speed) = &port.speed {
        write!(text, ", {speed}")?;
    }
    if port.lid != 0 {
        write!(text, ", lid {:#x}", port.lid)?;
    }
    if port.grh_required == Some(true) {
        write!(text, ", needs a global header")?;
    }
    write!(text, "\n    MTU: ")?;
    match (port.active_mtu, port.max_mtu) {
        (Some(active), Some(max)) => write!(text, "{active} active, {max} at most")?,
        (Some(active), None) => write!(text, "{active} active")?,
        _ => write!(text, "{ASK_LIBRARY}")?,
    }
    for interface in &port.interfaces {
        if let Some(mtu) = interface.mtu {
            write!(text, "; interface {} has {mtu}", interface.name)?;
        }
    }
    if let Some(bytes) = port.max_message {
        write!(text, "\n    longest message: {bytes} bytes")?;
    }
    let keys: Vec<_> = port.pkeys.iter().map(ToString::to_string).collect();
    writeln!(text, "\n    P_Keys ({} of {}): {}", keys.len(), port.pkey_table, keys.join(", "))?;
    writeln!(text, "    GIDs ({} of {}):", port.gids.len(), port.gid_table)?;
    let width = port.gids.iter().map(|entry| entry.gid.to_string().len()).max().unwrap_or(0);
    for entry in &port.gids {
        let interface = entry.interface.as_deref().unwrap_or("");
        let line =
            format!("      {:>5}  {:<width$}  {:<12}  {interface}", entry.index, entry.gid, entry.kind);
        writeln!(text, "{}", line.trim_end())?;
    }
    Ok(())
}

fn show_limits(text: &mut String, limits: &Limits) -> std::fmt::Result {
    let Limits { max_qp, max_qp_wr, max_sge, max_cq, max_cqe, max_mr, max_mr_size, max_pd, .. } = limits;
    writeln!(
        text,
        "  limits: max_qp {max_qp}, max_qp_wr {max_qp_wr}, max_sge {max_sge}, max_cq {max_cq}, \
         max_cqe {max_cqe}, max_mr {max_mr}, max_mr_size {max_mr_size}, max_pd {max_pd}, \
         max_qp_rd_atom {}, max_qp_init_rd_atom {}",
        limits.max_qp_rd_atom, limits.max_qp_init_rd_atom
    )
}

fn show_choice(text: &mut String, choice: &Choice, rail: Option<u8>) -> std::fmt::Result {
    match rail {
        Some(rail) => writeln!(text, "chosen for rail {rail}: {choice}")?,
        None => writeln!(text, "chosen: {choice}")?,
    }
    write!(text, "  queues of {} work requests, P_Key {}", choice.queue_depth, choice.pkey_index)?;
    if let Some(key) = choice.pkey {
        write!(text, " ({key:#06x})")?;
    }
    match choice.mtu {
        Some(mtu) => write!(text, ", MTU {mtu}")?,
        None => write!(text, ", the port's active MTU")?,
    }
    let header = if choice.global { "with" } else { "without" };
    writeln!(text, ", packets {header} a global header")
}
