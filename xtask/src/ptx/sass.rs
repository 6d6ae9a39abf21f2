//! Instructions, as the disassembler prints them.

/// An instruction, without its predicate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Instruction {
    pub address: u64,
    pub opcode: String,
    pub operands: String,
    pub control: Control,
}

/// The part of an instruction that orders it with those before it, whose results take a time that
/// the assembler cannot know.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Control {
    /// Scoreboard (0 to 5) that is busy until the result is there.
    pub busy: Option<u8>,
    /// Scoreboards that must not be busy when the instruction starts, a bit each.
    pub awaits: u8,
}

impl Control {
    /// Decodes the upper half of an instruction of 128 bits (since sm_70).
    fn of(upper: u64) -> Self {
        let busy = (upper >> 46 & 7) as u8;
        Self { busy: (busy < 6).then_some(busy), awaits: (upper >> 52 & 0x3f) as u8 }
    }
}

impl Instruction {
    /// Returns true if the opcode is `name` with all of these modifiers: `STG.E.MMIO.SYS` is `STG`
    /// with `MMIO` and `SYS`.
    pub fn is(&self, name: &str, modifiers: &[&str]) -> bool {
        let mut parts = self.opcode.split('.');
        parts.next() == Some(name)
            && modifiers.iter().all(|wanted| self.opcode.split('.').any(|part| part == *wanted))
    }

    /// Returns true for a load from memory that others see: global, or of an unknown space.
    pub fn is_load(&self, modifiers: &[&str]) -> bool {
        self.is("LDG", modifiers) || self.is("LD", modifiers)
    }

    /// Returns true for a store to memory that others see.
    pub fn is_store(&self, modifiers: &[&str]) -> bool {
        self.is("STG", modifiers) || self.is("ST", modifiers)
    }

    /// Returns the target of a branch.
    pub fn target(&self) -> Option<u64> {
        if !self.is("BRA", &[]) {
            return None;
        }
        let last = self.operands.rsplit([' ', ',']).next()?;
        u64::from_str_radix(last.trim().strip_prefix("0x")?, 16).ok()
    }

    /// Returns base register and offset of a memory operand: `desc[UR6][R134.64+0x20], R44`.
    pub fn address_operand(&self) -> Option<(&str, u64)> {
        let close = self.operands.rfind(']')?;
        let open = self.operands[..close].rfind('[')?;
        let inside = &self.operands[open + 1..close];
        let (base, offset) = inside.split_once('+').unwrap_or((inside, "0x0"));
        Some((base, u64::from_str_radix(offset.strip_prefix("0x")?, 16).ok()?))
    }
}

/// Parses a listing with lines like `/*0be0*/ @!P1 STG.E.MMIO.SYS [R40], R53 ; /* 0x... */`. The
/// upper half of the instruction is alone on the next line.
pub fn parse(listing: &str) -> Vec<Instruction> {
    let mut all: Vec<Instruction> = Vec::new();
    for line in listing.lines() {
        let upper = line.trim().strip_prefix("/* 0x").and_then(|rest| rest.strip_suffix(" */"));
        match (upper.map(|upper| u64::from_str_radix(upper, 16)), all.last_mut()) {
            (Some(Ok(upper)), Some(last)) => last.control = Control::of(upper),
            _ => all.extend(instruction(line)),
        }
    }
    all
}

/// Returns the part of a listing for one function.
pub fn function<'a>(listing: &'a str, name: &str) -> &'a str {
    const HEAD: &str = "Function : ";
    let mut parts = listing.split(HEAD).skip(1);
    parts.find(|part| part.lines().next().is_some_and(|head| head.trim() == name)).unwrap_or("")
}

fn instruction(line: &str) -> Option<Instruction> {
    let (address, rest) = line.trim_start().strip_prefix("/*")?.split_once("*/")?;
    let address = u64::from_str_radix(address, 16).ok()?;
    let mut text = rest.split_once(';')?.0.trim();
    if text.starts_with('@') {
        text = text.split_once(' ')?.1.trim_start();
    }
    let (opcode, operands) = text.split_once(' ').unwrap_or((text, ""));
    let (opcode, operands) = (opcode.to_owned(), operands.trim().to_owned());
    let control = Control::default();
    (!opcode.is_empty()).then_some(Instruction { address, opcode, operands, control })
}

/// Returns true if an instruction is between a backward branch and its target.
pub fn in_loop(all: &[Instruction], address: u64) -> bool {
    all.iter().any(|branch| {
        branch.address >= address && branch.target().is_some_and(|target| target <= address)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_listing_is_read() {
        let text = "\
\tcode for sm_90
        /*0be0*/              @!P1 STG.E.MMIO.SYS [R40], R53 ;   /* 0x0000003528009986 */
                                                                 /* 0x0003e2000c11e100 */
        /*c080*/                   STG.E.128 desc[UR6][R134.64+0x20], R44 ;  /* 0x00 */
        /*c5f0*/               @P0 BRA P3, 0x280 ;               /* 0x00 */
        /*0480*/                   ERRBAR;                       /* 0x00 */";
        let all = parse(text);
        assert_eq!(all.len(), 4);
        assert_eq!(all[0].address, 0xbe0);
        assert!(all[0].is_store(&["MMIO", "SYS"]) && !all[0].is_store(&["128"]));
        assert_eq!(all[0].address_operand(), Some(("R40", 0)));
        assert_eq!(all[1].address_operand(), Some(("R134.64", 0x20)));
        assert_eq!(all[2].target(), Some(0x280));
        assert_eq!(all[3].opcode, "ERRBAR");
        assert!(in_loop(&all, 0xbe0) && !in_loop(&all, 0x100));
    }

    #[test]
    fn the_order_of_instructions_is_read() {
        let text = "\
        /*0010*/                   S2R R56, SR_CTAID.X ;          /* 0x0000000000387919 */
                                                                 /* 0x000e220000002500 */
        /*0040*/                   IMAD R56, R56, UR4, R3 ;       /* 0x0000000438387c24 */
                                                                 /* 0x001fe2000f8e0203 */";
        let all = parse(text);
        assert_eq!(all[0].control, Control { busy: Some(0), awaits: 0 });
        assert_eq!(all[1].control, Control { busy: None, awaits: 1 });
    }

    #[test]
    fn each_function_has_its_own_part_of_a_listing() {
        let text = "\tcode for sm_90\n\t\tFunction : ab\n /*0*/ EXIT ;\n\
                    \t\tFunction : a\n /*0*/ NOP ;\n /*10*/ EXIT ;\n";
        assert_eq!(parse(function(text, "ab")).len(), 1);
        assert_eq!(parse(function(text, "a")).len(), 2);
        assert_eq!(function(text, "b"), "");
    }
}
